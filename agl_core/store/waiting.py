"""Callers that wait for rollouts to end; one event for each call, set by the commit that ends its
last rollout.
"""

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from agl_core.errors import StoreError
from agl_core.store.forking import fork_safe_lock


def check_timeout(seconds: float | None) -> None:
    """Refuse a limit of a wait that is no number.

    Raises:
        StoreError: It is NaN, so it would never be over.
    """
    if seconds is not None and math.isnan(seconds):
        raise StoreError("the timeout is NaN; give seconds, or None for no limit")


class Waiter:
    """One call that waits, in the event loop that made it."""

    def __init__(self, rollout_ids: Iterable[str]) -> None:
        self.pending = set(rollout_ids)
        """What it still waits for; belongs to `Waiters`."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return when nothing is pending any more."""
        await self._event.wait()

    def wake(self) -> None:
        """End the wait; from any thread."""
        with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._event.set)


class Waiters:
    """All calls that wait, from any thread and event loop."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._by_rollout: defaultdict[str, set[Waiter]] = defaultdict(set)

    def add(self, rollout_ids: Iterable[str]) -> Waiter:
        """Return a waiter for some rollouts, which have not been looked at yet."""
        waiter = Waiter(rollout_ids)
        with self._lock:
            for rollout_id in waiter.pending:
                self._by_rollout[rollout_id].add(waiter)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Forget a waiter."""
        with self._lock:
            for rollout_id in waiter.pending:
                self._forget(rollout_id, waiter)

    def finished(self, rollout_ids: Iterable[str]) -> None:
        """Say that rollouts have ended, or that there are no such rollouts."""
        with self._lock:
            for rollout_id in rollout_ids:
                for waiter in self._by_rollout.pop(rollout_id, ()):
                    waiter.pending.discard(rollout_id)
                    if not waiter.pending:
                        waiter.wake()

    def wake_all(self) -> None:
        """End every wait: the store closes."""
        self.finished(self.pending())

    def pending(self) -> Sequence[str]:
        """Return the rollouts that somebody waits for."""
        with self._lock:
            return list(self._by_rollout)

    def _forget(self, rollout_id: str, waiter: Waiter) -> None:
        waiters = self._by_rollout.get(rollout_id)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._by_rollout[rollout_id]
