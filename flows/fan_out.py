"""Run every request of a set: claim, start shards, and replace those that died."""

import asyncio

from agl_core import progress
from agl_core.errors import LedgerError
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.runner.shard import ShardRef
from agl_core.types.training import PolicyRef
from flows.shard_runs import run_shard
from tasks import context
from tasks.context import IterationRef
from tasks.publish import serve

_MAX_ROUNDS = 3
"""Shards of a set are replaced at most twice in one go; a restart of the run begins anew."""


async def roll_out(ref: IterationRef, stage: str, rollout_set: str, policy: PolicyRef) -> None:
    """Return once each request of the set has a finished record in the ledger; record that as a
    stage.

    Raises:
        LedgerError: Rollouts are left after the last round; the message holds the last shard's
        reason.
    """
    iteration = ref.open()
    if iteration.record(stage):
        return
    progress.report(progress.StageStarted(ref.iteration, stage))
    with iteration.stage(stage) as attempt:
        rollouts = RolloutSet(iteration, rollout_set)
        await _run_shards(ref, rollouts, policy)
        attempt.values |= {"rollout_set": rollout_set, "claims": len(rollouts.claims())}


async def _run_shards(ref: IterationRef, rollouts: RolloutSet, policy: PolicyRef) -> None:
    """Claim and run what is unfinished, until nothing is."""
    services = context.current()
    settings = services.run.config.rollout
    reason = ""
    for _ in range(_MAX_ROUNDS):
        pending = rollouts.unfinished()
        if not pending:
            return
        serve(policy)
        size = settings.shard_size or 512
        parts = [pending[start : start + size] for start in range(0, len(pending), size)]
        shards = [
            ShardRef(
                ledger=ref.ledger,
                s3=ref.s3,
                conditional_put=rollouts.storage.conditional_put,
                run_id=ref.run_id,
                iteration=ref.iteration,
                rollout_set=rollouts.name,
                claim=rollouts.claim(part).number,
                model_server=services.server.advertised_url,
                settings=settings,
            )
            for part in parts
        ]
        ends = await asyncio.gather(
            *(run_shard(shard, len(part)) for shard, part in zip(shards, parts, strict=True))
        )
        reason = next((end for end in ends if end), reason)
    if pending := rollouts.unfinished():
        raise LedgerError(
            f"{len(pending)} rollouts of {rollouts.name} have no outcome after "
            f"{_MAX_ROUNDS} rounds: {reason}"
        )
