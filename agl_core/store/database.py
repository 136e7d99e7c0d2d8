"""One SQLite connection for all threads of a process, and its transactions.

Calls are made where they are asked for, under a lock, and take tens of microseconds. Measured on
2026-11-29 (2 busy cores, CPython 3.11, a transaction of 2 reads and 3 updates, awaited one after
the other): 44 us in memory and 72 us on a WAL file; handed to a worker thread 240 to 440 us, and
8 to 12 ms as soon as the event loop has other work, because the thread then waits for the GIL after
each statement. Joining waiting calls into one commit (WAL, `synchronous=NORMAL`) gained nothing
over that. Only what takes long, records in bulk, goes to a thread (`agl_core.store.tables`). Whole
calls of a store, with records and JSON, take 0.1 to 0.8 ms (`benchmarks/store.py`).
"""

import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from agl_core.errors import StoreError, TransientError
from agl_core.store.forking import fork_safe_lock
from agl_core.store.schema import SCHEMA_VERSION, TABLES

MEMORY = ":memory:"
_WORTH_ANOTHER_TRY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
)
BUSY_SECONDS = 30.0
"""How long a call waits for another process's transaction; those take milliseconds."""


class Transaction:
    """What happens at one moment, all or nothing."""

    def __init__(self, connection: sqlite3.Connection, now: float) -> None:
        self._connection = connection
        self.now = now
        """UTC epoch seconds."""
        self.finished: list[str] = []
        """Rollouts that end in it."""

    def run(self, sql: str, *parameters: Any) -> int:
        """Execute a statement and return how many rows it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Execute a statement for each row of parameters."""
        self._connection.executemany(sql, rows)

    def one(self, sql: str, *parameters: Any) -> sqlite3.Row | None:
        """Return the first row, or None."""
        return self._connection.execute(sql, parameters).fetchone()

    def all(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        """Return all rows."""
        return self._connection.execute(sql, parameters).fetchall()

    def value(self, sql: str, *parameters: Any) -> Any:
        """Return the first column of the first row, or None."""
        row = self.one(sql, *parameters)
        return None if row is None else row[0]


class Database:
    """A store's tables in a file or in memory; any thread may use it, and any process a file.

    Args:
        path: Of the file, made where there is none, or `MEMORY`.
        clock: Returns UTC epoch seconds.
        on_finished: Called after a commit with the rollouts that ended in it.

    Raises:
        StoreError: The file is no database, or one of another version.
    """

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.time,
        on_finished: Callable[[Sequence[str]], None] = lambda finished: None,
    ) -> None:
        self.path = path
        self._clock = clock
        self._on_finished = on_finished
        self._lock = fork_safe_lock(self._leave_file)
        self._pid = os.getpid()
        self._is_closed = False
        self._opened = 0
        """How many connections there have been."""
        self._connection: sqlite3.Connection | None = self._open("rwc")

    @contextmanager
    def write(self) -> Generator[Transaction]:
        """Make changes: committed when the block ends, undone when it raises.

        Raises:
            TransientError: Another process held the file for `BUSY_SECONDS`, or the disk is full or
                fails.
            StoreError: SQLite refuses what it is given.
        """
        with self._transaction("IMMEDIATE") as transaction:
            yield transaction
        if transaction.finished:
            self._on_finished(transaction.finished)

    @contextmanager
    def read(self) -> Generator[Transaction]:
        """Look at one moment."""
        with self._transaction("DEFERRED") as transaction:
            yield transaction

    def version(self) -> tuple[int, int]:
        """Return what differs from before where another connection may have committed since."""
        with self.read() as transaction:
            return self._opened, transaction.value("PRAGMA data_version")

    def close(self) -> None:
        """Close the connection; later calls raise."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None and not self._is_inherited_memory:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _transaction(self, kind: Literal["IMMEDIATE", "DEFERRED"]) -> Generator[Transaction]:
        with self._lock:
            connection = self._current()
            try:
                connection.execute(f"BEGIN {kind}")
                yield Transaction(connection, self._clock())
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise _translated(error, self.path) from error
            except OverflowError as error:
                raise StoreError("a number has more than 64 bits") from error
            except UnicodeEncodeError as error:
                raise StoreError(f"a text cannot be kept: {error}") from error
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _current(self) -> sqlite3.Connection:
        if self._is_closed:
            raise StoreError(f"the store {self.path} is closed")
        if self._is_inherited_memory:
            raise StoreError(
                f"this store lives in the memory of process {self._pid}; use a store on a file, or "
                "a LightningStoreServer, from several processes"
            )
        if self._connection is None:
            self._connection = self._open("rw")
        return self._connection

    @property
    def _is_inherited_memory(self) -> bool:
        return self.path == MEMORY and self._pid != os.getpid()

    def _leave_file(self) -> None:
        """Close the connection before a fork: SQLite allows none to be carried over it, and what a
        process notes down of its locks on the file, the child would take for its own.
        """
        if self.path != MEMORY and self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self, mode: Literal["rw", "rwc"]) -> sqlite3.Connection:
        uri = (
            MEMORY if self.path == MEMORY else f"{Path(self.path).absolute().as_uri()}?mode={mode}"
        )
        self._opened += 1
        try:
            connection = sqlite3.connect(
                uri,
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:  # a folder, or no permission
            raise StoreError(f"{self.path} cannot be opened as a store: {error}") from error
        connection.row_factory = sqlite3.Row
        try:
            # WAL with NORMAL: a commit is in the operating system when it returns, not on the disk.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            _make_tables(connection, self.path)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            connection.close()
            raise _translated(error, f"{self.path} cannot be opened as a store") from error
        except StoreError:
            connection.close()
            raise
        return connection


def _translated(error: sqlite3.Error, subject: str) -> StoreError | TransientError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if code == sqlite3.SQLITE_BUSY:
        return TransientError(
            f"{subject}: another process writes to it and did not let go within "
            f"{BUSY_SECONDS:g} s; is one stopped? ({error})"
        )
    kind = TransientError if code in _WORTH_ANOTHER_TRY else StoreError
    return kind(f"{subject}: {error}")


def _make_tables(connection: sqlite3.Connection, path: str) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == SCHEMA_VERSION:
        return
    if version != 0 or connection.execute("SELECT 1 FROM sqlite_schema").fetchone():
        raise StoreError(f"{path} has tables of version {version}, not {SCHEMA_VERSION}")
    for statement in TABLES.split(";"):
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES ('run_id', ?)", (f"run-{uuid.uuid4().hex[:12]}",))
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
