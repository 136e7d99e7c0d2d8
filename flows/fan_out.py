"""Run every request of a set: claim, start shards, and replace those that died."""

import asyncio
import statistics
from dataclasses import dataclass, field

from agl_core import progress
from agl_core.errors import LedgerError
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger
from agl_core.runner.failed import check_failures
from agl_core.runner.shard import ShardRef
from agl_core.runner.sizing import Measured, ShardPlan, plan_shards
from agl_core.types.training import PolicyRef
from flows.shard_runs import run_shard
from tasks import context
from tasks.context import IterationRef
from tasks.publish import serve

_MAX_TRIES = 3
"""A shard is replaced at most twice in one go; a restart of the run begins anew."""


async def roll_out(ref: IterationRef, stage: str, rollout_set: str, policy: PolicyRef) -> None:
    """Return once each request of the set has a finished record in the ledger; record that as a
    stage.

    After a start that failed, and when an iteration is retried by itself, the rollouts that failed
    then run again too.

    Raises:
        LedgerError: Rollouts are left after the last try; the message holds the last shard's
        reason.
        TransientError: No worker started a shard in time.
        RunCancelled: A shard was cancelled by itself.
        IterationStopped: More of them failed than the run permits. Nothing is recorded, so the next
        start runs them again.
    """
    iteration = ref.open()
    if iteration.record(stage):
        return
    progress.report(progress.StageStarted(ref.iteration, stage))
    with iteration.stage(stage) as attempt:
        rollouts = RolloutSet(iteration, rollout_set)
        pending = rollouts.unfinished(include_failed=context.current().runs_failed_again)
        if pending:
            fan_out = _FanOut(ref, rollouts, policy, _measured(iteration))
            await fan_out.run(pending)
            attempt.values |= fan_out.measures()
        check_failures(rollouts, context.current().run.config.failures)
        rollouts.record(attempt)


def _measured(iteration: IterationLedger) -> Measured | None:
    """Return what shards took in this iteration, else in the one before; None where none ran."""
    places = [(iteration, "rollout"), (iteration, "rollout_base")]
    if iteration.iteration > 0:
        places.append((iteration.before(), "rollout"))
    for place, stage in places:
        record = place.record(stage)
        if record is not None and record.values.get("startup_seconds") is not None:
            return Measured(record.values["startup_seconds"], record.values["rollout_seconds"])
    return None


@dataclass
class _FanOut:
    """The shards of one set."""

    ref: IterationRef
    rollouts: RolloutSet
    policy: PolicyRef
    measured: Measured | None
    startup_seconds: list[float] = field(default_factory=list)
    num_shards: int = 0

    async def run(self, pending: list[int]) -> None:
        """Run some rollouts to their ends, in shards side by side."""
        run = context.current().run
        plan = plan_shards(len(pending), run.config.rollout, self.measured)
        serve(self.policy)
        slots = asyncio.Semaphore(plan.at_once)
        first = 0
        try:
            async with asyncio.TaskGroup() as group:
                for size in plan.sizes:
                    part = pending[first : first + size]
                    first += size
                    group.create_task(self._run_part(part, plan, slots))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        except asyncio.CancelledError:
            # At once: shards on the pool look for it, and what follows may take a while.
            if run.ledger.lease is not None:
                run.ledger.lease.end("cancelled")
            raise

    async def _run_part(self, part: list[int], plan: ShardPlan, slots: asyncio.Semaphore) -> None:
        """Run one part in a shard, and what that left in others, until nothing is left."""
        services, reason = context.current(), ""
        for _ in range(_MAX_TRIES):
            async with slots:
                claim = self.rollouts.claim(part)
                shard = self._shard(claim.number, plan.concurrency)
                end = await run_shard(shard, len(part), services.run.ledger.starts)
            self.num_shards += 1
            if end.startup_seconds is not None:
                self.startup_seconds.append(end.startup_seconds)
            reason = end.reason or reason
            part = self.rollouts.unfinished_of(claim)
            if not part:
                return
            check_failures(self.rollouts, services.run.config.failures)
        raise LedgerError(
            f"{len(part)} rollouts of {self.rollouts.name} have no outcome after {_MAX_TRIES} "
            f"shards: {reason}"
        )

    def _shard(self, claim: int, concurrency: int) -> ShardRef:
        services = context.current()
        lease = services.run.ledger.lease
        assert lease is not None, "rollouts run only while this process holds the run"
        return ShardRef(
            ledger=self.ref.ledger,
            s3=self.ref.s3,
            conditional_put=self.rollouts.storage.conditional_put,
            run_id=self.ref.run_id,
            iteration=self.ref.iteration,
            rollout_set=self.rollouts.name,
            claim=claim,
            model_servers=services.server.advertised_urls,
            settings=services.run.config.rollout,
            failures=services.run.config.failures,
            start=lease.number,
            concurrency=concurrency,
        )

    def measures(self) -> dict[str, float | int | None]:
        """Return what the shards took, for the sizes of later ones."""
        outcomes = self.rollouts.outcomes()
        total = sum(outcomes["duration_seconds"].to_pylist())
        known = self.startup_seconds
        return {
            "shards": self.num_shards,
            "startup_seconds": statistics.median(known) if known else None,
            "rollout_seconds": total / max(len(set(outcomes["index"].to_pylist())), 1),
        }
