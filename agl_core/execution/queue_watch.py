"""Whether rollouts wait for runners that have all ended."""

import asyncio
import time
from collections.abc import Callable

from agl_core.errors import ExecutionError
from agl_core.store.base import LightningStore

_LOOK_SECONDS = 1.0
_TICK_SECONDS = 0.1


class QueueWatch:
    """Looks at a store's queue once every runner has ended by itself (`max_rollouts`)."""

    def __init__(self) -> None:
        self._next_look = 0.0

    async def check(self, store: LightningStore) -> None:
        """Look at the queue, once a second at most.

        Raises:
            ExecutionError: Rollouts are queued, and nobody is left to run them.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        queued = await store.query_rollouts(status_in=["queuing", "requeuing"], limit=0)
        if queued.total:
            raise ExecutionError(
                f"every runner has ended, and {queued.total} rollouts are queued that nobody will "
                "run; is max_rollouts too low?"
            )


async def await_algorithm(is_over: Callable[[], bool], store: LightningStore) -> None:
    """Wait until an algorithm is over whose runners have all ended by themselves.

    Raises:
        ExecutionError: Rollouts are queued, and nobody is left to run them.
    """
    watch = QueueWatch()
    while not is_over():
        await watch.check(store)
        await asyncio.sleep(_TICK_SECONDS)
