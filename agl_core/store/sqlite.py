"""The store on disk."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agl_core.store.attempt_table import Deadlines
from agl_core.store.base import LightningStoreCapabilities
from agl_core.store.collection_based import CollectionBasedLightningStore


class SqliteLightningStore(CollectionBasedLightningStore):
    """A store in one SQLite file (WAL).

    What a call has returned survives the kill of the process (SIGKILL) at any moment. A power cut
    or a crash of the operating system may undo the last calls, some seconds or, with little
    traffic, more; the file stays consistent. Opening it again goes on where it was: queue, running
    attempts with their deadlines, and who asked what under which key.

    Several processes of one machine may open the same file at once, each by a store of its own
    (a store pickles into one, and reopens itself after a fork). A rollout that another process ends
    wakes waiters after at most `scan_debounce_seconds`. Keep the file off network file systems.

    Args:
        path: Of the file, made where there is none.
        scan_debounce_seconds: See `StoreTables`.
        deadlines: See `StoreTables`.
        clock: See `StoreTables`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        scan_debounce_seconds: float = 0.5,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        absolute = Path(path).absolute()
        absolute.parent.mkdir(parents=True, exist_ok=True)
        self._settings = {
            "scan_debounce_seconds": scan_debounce_seconds,
            "deadlines": deadlines,
            "clock": clock,
        }
        super().__init__(
            str(absolute),
            scan_debounce_seconds=scan_debounce_seconds,
            deadlines=deadlines,
            clock=clock,
        )

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Threads, event loops and processes may use it at once."""
        return LightningStoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=False
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._database.path, self._settings)


def _reopen(path: str, settings: dict[str, Any]) -> SqliteLightningStore:
    return SqliteLightningStore(path, **settings)
