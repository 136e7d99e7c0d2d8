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
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from agl_core.errors import StoreError, TransientError
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
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._inherited: list[sqlite3.Connection] = []
        self._connection: sqlite3.Connection | None = self._open()

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

    def changed_elsewhere(self, seen: int) -> tuple[bool, int]:
        """Tell whether another connection has committed since a version was seen, and return the
        version now.
        """
        with self.read() as transaction:
            version: int = transaction.value("PRAGMA data_version")
        return version != seen, version

    def close(self) -> None:
        """Close the connection; later calls raise."""
        self._follow_fork()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _transaction(self, kind: Literal["IMMEDIATE", "DEFERRED"]) -> Generator[Transaction]:
        self._follow_fork()
        with self._lock:
            if self._connection is None:
                raise StoreError(f"the store {self.path} is closed")
            try:
                self._connection.execute(f"BEGIN {kind}")
                yield Transaction(self._connection, self._clock())
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
                kind_of_error = TransientError if code in _WORTH_ANOTHER_TRY else StoreError
                raise kind_of_error(f"{self.path}: {error}") from error
            except OverflowError as error:
                raise StoreError("a number has more than 64 bits") from error
            except UnicodeEncodeError as error:
                raise StoreError(f"a text cannot be kept: {error}") from error
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _follow_fork(self) -> None:
        # SQLite forbids carrying a connection over a fork; closing it here would also be wrong.
        if self._pid == os.getpid():
            return
        if self.path == MEMORY:
            raise StoreError(
                f"this store lives in the memory of process {self._pid}; use a store on a file, or "
                "a LightningStoreServer, from several processes"
            )
        if self._connection is not None:
            self._inherited.append(self._connection)
            self._lock = threading.RLock()
            self._connection = self._open()
        self._pid = os.getpid()

    def _open(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
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
        except sqlite3.DatabaseError as error:
            connection.close()
            raise StoreError(f"{self.path} cannot be opened as a store: {error}") from error
        except StoreError:
            connection.close()
            raise
        return connection


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
