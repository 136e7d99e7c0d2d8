"""The store in memory."""

import time
from collections.abc import Callable

from agl_core.store.attempt_table import Deadlines
from agl_core.store.collection_based import CollectionBasedLightningStore
from agl_core.store.database import MEMORY


class InMemoryLightningStore(CollectionBasedLightningStore):
    """A store that ends with its process."""

    def __init__(
        self,
        *,
        thread_safe: bool = False,
        scan_debounce_seconds: float = 0.5,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        del thread_safe  # it always is
        super().__init__(
            MEMORY,
            scan_debounce_seconds=scan_debounce_seconds,
            deadlines=deadlines,
            clock=clock,
        )
