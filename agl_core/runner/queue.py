"""The store's queue as one worker takes rollouts from it."""

import asyncio
import logging
import random
import time
import uuid

from agl_core.errors import TransientError
from agl_core.runner.base import EVENT_POLL_SECONDS, StopEvent, is_set
from agl_core.store.base import LightningStore
from agl_core.types.core import AttemptedRollout

logger = logging.getLogger(__name__)


class RolloutQueue:
    """Takes one rollout at a time; a call whose answer was lost is repeated with its key, so that
    the rollout is not lost with it.

    Args:
        store: Whose queue it is.
        worker_id: Who takes rollouts.
        poll_interval_seconds: Between two looks at an empty queue.
        jitter_seconds: By which each interval is longer or shorter, at most.
    """

    def __init__(
        self,
        store: LightningStore,
        worker_id: str,
        *,
        poll_interval_seconds: float,
        jitter_seconds: float,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._poll_interval_seconds = poll_interval_seconds
        self._jitter_seconds = jitter_seconds
        self._jitter = random.Random()
        self._key = uuid.uuid4().hex

    async def take(self, event: StopEvent | None) -> AttemptedRollout | None:
        """Return a rollout; where there is none, or the store is away, None after the interval.

        Args:
            event: Set from elsewhere to stop waiting.
        """
        try:
            rollout = await self._store.dequeue_rollout(self._worker_id, idempotency_key=self._key)
            self._key = uuid.uuid4().hex
        except TransientError as error:
            logger.warning(
                "no rollout taken, will try again: worker=%s: %s", self._worker_id, error
            )
            rollout = None
        if rollout is None:
            await self._pause(event)
        return rollout

    async def _pause(self, event: StopEvent | None) -> None:
        jitter = self._jitter.uniform(-self._jitter_seconds, self._jitter_seconds)
        until = time.monotonic() + max(0.0, self._poll_interval_seconds + jitter)
        while not is_set(event):
            left = until - time.monotonic()
            await asyncio.sleep(max(0.0, min(left, EVENT_POLL_SECONDS)))
            if left <= 0:
                return
