"""How long an algorithm waits for rollouts that nobody takes.

One that is under way ends by its deadline in the store. One in the queue waits for a runner, and
there may be none.
"""

import logging
import time
from collections.abc import Collection, Iterable

from agl_core.errors import StoreError, TransientError
from agl_core.store.base import LightningStore

logger = logging.getLogger(__name__)

_WARN_SECONDS = 60.0


class Patience:
    """Ends a wait in which nothing happens.

    Args:
        store: Where the rollouts are.
        seconds: How long none may end while none is under way.
        what: Whose rollouts they are, for messages.
    """

    def __init__(self, store: LightningStore, seconds: float, what: str) -> None:
        self._store = store
        self._seconds = seconds
        self._what = what
        self._since = self._warned = time.monotonic()

    def renew(self) -> None:
        """Note that something happened."""
        self._since = self._warned = time.monotonic()

    async def check(self, rollout_ids: Collection[str]) -> None:
        """Return while there is hope for some of these rollouts.

        Raises:
            TransientError: None is under way, and nothing happened for too long.
        """
        now = time.monotonic()
        waited = now - self._since
        if not rollout_ids or now - self._warned < min(_WARN_SECONDS, self._seconds):
            return
        self._warned = now
        running = await self._store.query_rollouts(status_in=["preparing", "running"])
        if any(rollout.rollout_id in rollout_ids for rollout in running):
            self._since = now
            return
        message = (
            f"{self._what}: no runner took one of {len(rollout_ids)} queued rollouts for "
            f"{waited:.0f} s"
        )
        if waited >= self._seconds:
            raise TransientError(f"{message}; are runners connected to this store?")
        logger.warning("%s; still waiting", message)


async def cancel_rollouts(store: LightningStore, rollout_ids: Iterable[str]) -> None:
    """End rollouts that nobody waits for any more, so that no runner is busy with them.

    One that has ended meanwhile stays as it is; a store that is away is no further error.
    """
    for rollout_id in rollout_ids:
        try:
            await store.update_rollout(rollout_id, status="cancelled")
        except StoreError as error:  # ended already
            logger.debug("rollout=%s is not cancelled: %s", rollout_id, error)
        except TransientError as error:
            logger.warning("rollouts stay in the store, which is away: %s", error)
            return
