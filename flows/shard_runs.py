"""Start one shard, in this process or through a deployment on a work pool, and wait for its end.

A shard on a pool is watched by its signs of life in the ledger: Prefect leaves a run whose worker's
host died in the state "Running" for ever.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.deployments import arun_deployment
from prefect.states import Cancelled, Crashed

from agl_core.errors import LedgerError, RunCancelled, TransientError
from agl_core.ledger.signs import SignOfLife, read_sign
from agl_core.ledger.starts import RunStarts
from agl_core.runner.shard import ShardRef
from flows.patience import patiently
from flows.pool_state import look, why_never_started, why_not_started
from flows.rollout_shard import rollout_shard

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10
"""The end of a run is told by an event; everything else is looked at this often."""
_SAY_SECONDS = 30.0
"""How often a shard that waits for its start is spoken of."""
_LOST_SECONDS = 60.0
"""Without a sign of life: the shard is given up and replaced."""


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """How the flow run of a shard ended."""

    reason: str = ""
    """Why it did not complete; empty if it did."""
    startup_seconds: float | None = None
    """On a work pool: from the request until its flow ran."""


async def run_shard(shard: ShardRef, num_rollouts: int, starts: RunStarts) -> ShardEnd:
    """Run a shard to its end, however it ends. What its rollouts gave is in the ledger, and only
    there.

    Args:
        shard: What to run.
        num_rollouts: Of the shard, for its deadline.
        starts: Of its run.

    Raises:
        RunCancelled: Someone cancelled the shard itself.
        TransientError: No worker started it in time; the message says what it waited for.
    """
    try:
        if shard.settings.deployment is not None:
            return await _PoolShard(shard, num_rollouts, starts).run(shard.settings.deployment)
        # Prefect's overloads know nothing of return_state for async flows.
        in_process: Any = rollout_shard
        state = await in_process(shard, return_state=True)
    except httpx.HTTPError as error:
        return ShardEnd(f"shard {shard.name}: the Prefect server does not answer: {error!r}")
    return _end(shard, state)


def _end(shard: ShardRef, state: Any, startup_seconds: float | None = None) -> ShardEnd:
    if state.is_cancelled():
        raise RunCancelled(f"shard {shard.name} was cancelled: {state.message}")
    reason = "" if state.is_completed() else f"shard {shard.name}: {state.name}: {state.message}"
    return ShardEnd(reason, startup_seconds)


class _PoolShard:
    """The flow run of a shard on a work pool, from its request to its end."""

    def __init__(self, shard: ShardRef, num_rollouts: int, starts: RunStarts) -> None:
        self.shard = shard
        self.starts = starts
        self.deadline_seconds = shard_deadline(shard, num_rollouts)
        self.requested = time.monotonic()
        self.spoken = self.requested
        self.began: float | None = None
        """When its flow was first seen to run."""
        self.sign: SignOfLife | None = None
        self.sign_changed = self.requested

    async def run(self, deployment: str) -> ShardEnd:
        # For repeated requests of this call only: each claim is started once, and a run that is
        # begun anew with an emptied ledger must not find the shards of the old one.
        idempotency_key = f"{self.shard.name}-{uuid.uuid4().hex}"
        run = await patiently(
            lambda: arun_deployment(
                deployment,
                parameters={"shard": self.shard.model_dump(mode="json")},
                flow_run_name=self.shard.name,
                timeout=0,
                idempotency_key=idempotency_key,
                tags=[self.shard.run_id],
            )
        )
        while True:
            found = await look(run.id, _LOOK_SECONDS)
            if found is None:
                return ShardEnd(f"shard {self.shard.name}: its flow run was deleted")
            if found.state and found.state.is_final():
                return _end(self.shard, found.state, _startup_seconds(found))
            reason = await self._why_given_up(found)
            if reason:
                return ShardEnd(await self._give_up(run.id, reason))

    async def _why_given_up(self, run: Any) -> str:
        """Return why the shard is not waited for any longer; empty where it is."""
        now = time.monotonic()
        if not (run.state and run.state.is_running()) and self.began is None:
            if reason := await why_never_started(run):
                return reason
            await self._check_start(run, now)
            return ""
        if self.began is None:
            self.began = self.sign_changed = now
        sign = await asyncio.to_thread(self._read_sign)
        if sign != self.sign:
            self.sign, self.sign_changed = sign, now
        if now - self.sign_changed > _LOST_SECONDS:
            where = f"process {sign.pid} on host {sign.host}" if sign else "its process"
            return f"{where} has given no sign of life for {_LOST_SECONDS:.0f} s"
        if now - self.began > self.deadline_seconds:
            return f"it has not ended {self.deadline_seconds:.0f} s after it began"
        return ""

    def _read_sign(self) -> SignOfLife | None:
        """Return the shard's last sign of life; a ledger that is away has no new one."""
        key = self.starts.shard_key(self.shard.start, self.shard.key, "alive")
        try:
            return read_sign(self.starts.storage, key)
        except LedgerError as error:
            logger.warning("cannot look for signs of life of %s: %s", self.shard.name, error)
            self.sign_changed = time.monotonic()
            return self.sign

    async def _check_start(self, run: Any, now: float) -> None:
        """Say what a shard waits for that nobody has started.

        Raises:
            TransientError: It waited too long.
        """
        waited, limit = now - self.requested, self.shard.settings.startup_timeout_seconds
        is_late = waited > limit
        if not is_late and now - self.spoken < _SAY_SECONDS:
            return
        self.spoken = now
        text = (
            f"shard {self.shard.name} has waited to be started for {waited:.0f} s, of "
            f"{limit:.0f} s at most (rollout.startup_timeout_seconds): {await why_not_started(run)}"
        )
        if not is_late:
            logger.warning("%s", text)
            return
        self.starts.give_up(self.shard.start, self.shard.key, "not started in time")
        await _set_state(run.id, Cancelled(message="not started in time"))
        raise TransientError(text)

    async def _give_up(self, run_id: UUID, reason: str) -> str:
        """Have the shard stop, should it live, and show its run as crashed."""
        self.starts.give_up(self.shard.start, self.shard.key, reason)
        logger.warning("shard %s is given up and replaced: %s", self.shard.name, reason)
        await _set_state(run_id, Crashed(message=f"given up and replaced: {reason}"))
        return f"shard {self.shard.name}: {reason}"


async def _set_state(run_id: UUID, state: Any) -> None:
    async def set_it() -> None:
        async with get_client() as client:
            await client.set_flow_run_state(run_id, state, force=True)

    await patiently(set_it)


def _startup_seconds(run: Any) -> float | None:
    if run.start_time is None or run.expected_start_time is None:
        return None
    return max((run.start_time - run.expected_start_time).total_seconds(), 0.0)


def shard_deadline(shard: ShardRef, num_rollouts: int) -> float:
    """Return the seconds in which a shard must end once it began, every attempt at its deadline."""
    settings, failures = shard.settings, shard.failures
    rounds = -(-num_rollouts // shard.concurrency)
    rollout = failures.most_attempts() * settings.timeout_seconds + failures.longest_wait_seconds()
    return _LOST_SECONDS + rounds * rollout
