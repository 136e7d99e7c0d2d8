"""Signs of life of one worker: leases of its attempts, and what it says about its machine.

A lease is renewed at least every 10 s, more often where the heartbeats are, or where a rollout's
`unresponsive_seconds` is short. The answer names the attempts that have to stop (cancelled, timed
out, given to another worker); their agents are told at once. Snapshots go out with the heartbeats,
one at a time, and delay no renewal; an interval of 0 or less switches them off, not the leases.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from agl_core.errors import ConfigError
from agl_core.store.base import LightningStore
from agl_core.types.core import AttemptedRollout
from agl_core.utils.system_snapshot import system_snapshot

logger = logging.getLogger(__name__)

LaunchMode = Literal["asyncio", "thread"]

LEASE_RENEWAL_SECONDS = 10.0
"""A sixth of the store's default lease."""
_RENEWALS_PER_SILENCE = 4
_TICK_SECONDS = 0.1
_JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Lease:
    rollout_id: str
    renewal_seconds: float
    stop: Callable[[], object]


class Heartbeat:
    """Renews leases and sends snapshots while its block runs.

    Args:
        store: Told; called from another thread in the mode "thread".
        worker_id: Whose life it is.
        interval_seconds: Between two snapshots; 0 or less for none.
        jitter_seconds: By which each interval is longer or shorter, at most.
        include_gpu: Whether the snapshot has GPUs.
        launch_mode: "asyncio" for a task of the event loop; "thread" for a thread, whose heartbeats
            go on while an agent blocks the event loop.

    Raises:
        ConfigError: "thread" with a store that is not thread-safe.
    """

    def __init__(
        self,
        store: LightningStore,
        worker_id: str,
        *,
        interval_seconds: float = 10.0,
        jitter_seconds: float = 0.5,
        include_gpu: bool = False,
        launch_mode: LaunchMode = "asyncio",
    ) -> None:
        if launch_mode == "thread" and not store.capabilities.get("thread_safe", False):
            raise ConfigError(
                "heartbeat_launch_mode 'thread' needs a thread-safe store; wrap it in "
                "LightningStoreThreaded, or use 'asyncio'"
            )
        self._store = store
        self._worker_id = worker_id
        self._interval_seconds = interval_seconds
        self._jitter_seconds = jitter_seconds
        self._include_gpu = include_gpu
        self._launch_mode = launch_mode
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._stopped = threading.Event()
        self._jitter = random.Random()

    @contextmanager
    def keeping(self, rollout: AttemptedRollout, stop: Callable[[], object]) -> Generator[None]:
        """Renew the lease of an attempt while the block runs.

        Args:
            rollout: With the attempt.
            stop: Called once, in this event loop, when the store says that the attempt has to stop.
        """
        loop = asyncio.get_running_loop()
        silence = rollout.config.unresponsive_seconds
        renewals = [LEASE_RENEWAL_SECONDS]
        renewals += [self._interval_seconds] if self._interval_seconds > 0 else []
        renewals += [silence / _RENEWALS_PER_SILENCE] if silence is not None else []
        lease = _Lease(rollout.rollout_id, min(renewals), lambda: loop.call_soon_threadsafe(stop))
        attempt_id = rollout.attempt.attempt_id
        with self._lock:
            self._leases[attempt_id] = lease
        try:
            yield
        finally:
            with self._lock:
                self._leases.pop(attempt_id, None)

    async def __aenter__(self) -> Self:
        if self._launch_mode == "thread":
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._beat()), name="agl-heartbeat", daemon=True
            )
            self._thread.start()
        else:
            self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._stopped.set()
        if self._launch_mode == "thread":
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        else:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _beat(self) -> None:
        renewed = time.monotonic()
        next_snapshot = renewed if self._interval_seconds > 0 else None
        snapshot: asyncio.Task[None] | None = None  # of its own: a slow one delays no renewal
        try:
            while not self._stopped.is_set():
                now = time.monotonic()
                with self._lock:
                    leases = dict(self._leases)
                if leases and now - renewed >= _shortest(leases):
                    await self._renew(leases)
                    renewed = now
                if next_snapshot is not None and now >= next_snapshot:
                    if snapshot is None or snapshot.done():
                        snapshot = asyncio.create_task(self._send_snapshot())
                    next_snapshot = now + self._interval()
                await asyncio.sleep(_TICK_SECONDS)
        finally:
            if snapshot is not None:
                snapshot.cancel()
                await asyncio.wait({snapshot}, timeout=_JOIN_SECONDS)

    async def _renew(self, leases: dict[str, _Lease]) -> None:
        attempts = [(lease.rollout_id, attempt_id) for attempt_id, lease in leases.items()]
        try:
            ended = await self._store.renew_leases(self._worker_id, attempts)
        except Exception as error:  # noqa: BLE001 - whatever a store raises; the next beat tries again
            logger.warning("leases not renewed: worker=%s: %s", self._worker_id, error)
            return
        for attempt_id in ended:
            with self._lock:
                lease = self._leases.pop(attempt_id, None)
            if lease is not None:
                logger.info("the store ended the attempt: attempt=%s", attempt_id)
                lease.stop()

    async def _send_snapshot(self) -> None:
        try:
            snapshot = await asyncio.to_thread(system_snapshot, self._include_gpu)
            await self._store.update_worker(self._worker_id, snapshot)
        except Exception as error:  # noqa: BLE001 - a display; the next beat tries again
            logger.warning("heartbeat not sent: worker=%s: %s", self._worker_id, error)

    def _interval(self) -> float:
        jitter = self._jitter.uniform(-self._jitter_seconds, self._jitter_seconds)
        return max(0.0, self._interval_seconds + jitter)


def _shortest(leases: dict[str, _Lease]) -> float:
    return min(lease.renewal_seconds for lease in leases.values())
