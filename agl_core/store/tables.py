"""What a store over SQLite consists of: its tables, those who wait, and the watchdog."""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

from agl_core.store import leases, rollout_table
from agl_core.store.attempt_table import Deadlines
from agl_core.store.base import LightningStore
from agl_core.store.database import Database, Transaction
from agl_core.store.waiting import Waiters
from agl_core.store.watchdog import Watchdog

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

BULK = 500
"""Records from which on a call goes to a thread, lest it hold up its event loop.

JSON of rollouts and spans is made before the transaction, records of a question after it. The
transaction itself still holds up other calls of the store, and of a question the event loop.
Measured on 2026-11-29 (2 busy cores): 0.2 to 0.6 s while 30 000 rollouts are queued (1 to 2 s in
all), 0.2 s while 3000 are taken, 0.2 to 0.3 s for the rows of a question with 30 000 answers.
"""


class StoreTables(LightningStore):
    """A database that is kept current while it is open.

    Args:
        path: Of the file, or `database.MEMORY`.
        scan_debounce_seconds: Between two looks for expired attempts, which a thread takes whether
            or not the store is used; also how often changes by other processes are looked for
            while somebody waits. 0 looks before every call too.
        deadlines: Of attempts whose rollout's config has none.
        clock: Returns UTC epoch seconds.

    Raises:
        ValueError: `scan_debounce_seconds` is below 0.
        StoreError: The file cannot be opened as a store.
    """

    def __init__(
        self,
        path: str,
        *,
        scan_debounce_seconds: float = 0.5,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if scan_debounce_seconds < 0:
            raise ValueError(f"scan_debounce_seconds is {scan_debounce_seconds}, below 0")
        self._waiters = Waiters()
        self._database = Database(path, clock, self._waiters.finished)
        self._deadlines = deadlines or Deadlines()
        self._scan_always = scan_debounce_seconds == 0
        self._watchdog = Watchdog(self._scan, scan_debounce_seconds or 0.5)
        self._version = (0, 0)
        self._opened = time.monotonic()
        with self._database.read() as transaction:
            self._run_id: str = transaction.value("SELECT value FROM meta WHERE key = 'run_id'")

    async def close(self) -> None:
        """Stop the watchdog and close the database; calls that wait raise."""
        self._watchdog.stop()
        self._database.close()
        self._waiters.wake_all()

    @contextmanager
    def _read(self) -> Generator[Transaction]:
        self._look_first()
        with self._database.read() as transaction:
            yield transaction

    @contextmanager
    def _write(self) -> Generator[Transaction]:
        self._look_first()
        with self._database.write() as transaction:
            yield transaction

    def _look_first(self) -> None:
        self._watchdog.start()
        if self._scan_always:
            self._expire()

    def _scan(self) -> None:
        """End expired attempts, and find out what other processes have ended."""
        self._expire()
        version = self._database.version()
        # After the version: who begins to wait later looks by itself at what this scan has seen.
        pending = self._waiters.pending()
        if pending and version != self._version:
            with self._database.read() as transaction:
                still = rollout_table.pending(transaction, pending)
            self._waiters.finished(set(pending) - still)
        self._version = version

    def _expire(self) -> None:
        with self._database.read() as transaction:
            due = leases.any_expired(transaction)
        if due:
            with self._database.write() as transaction:
                leases.expire(transaction)


async def in_bulk(size: int, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
    """Call a function here, or from `BULK` records on in a thread."""
    if size < BULK:
        return function(*args)
    return await asyncio.to_thread(function, *args)
