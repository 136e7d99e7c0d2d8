"""The rollouts of one runner: one task run each, flushed to the ledger as they finish."""

import asyncio
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from pydantic import BaseModel, ConfigDict

from agl_core.errors import AglError, LedgerError
from agl_core.runner.shard import Shard, ShardRef, open_shard
from flows.failure import fails_in_one_sentence
from tasks.credentials import s3_credentials
from tasks.logs import show_agent_logs, show_logs
from tasks.report import show_failed
from tasks.rollout import rollout_task


class ShardSummary(BaseModel):
    """How a shard ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    claim: int
    kinds: dict[str, int]
    """Rollouts by how their last attempt ended."""


@flow(name="rollout-shard", flow_run_name="{shard.name}", persist_result=False)
@fails_in_one_sentence
async def rollout_shard(shard: ShardRef) -> ShardSummary:
    """Run the rollouts of one claim.

    Raises:
        LedgerError: A rollout ended without a recorded outcome, or the ledger cannot be written.
        IterationStopped: More rollouts failed than the run permits; those that ran were cancelled.
    """
    show_logs()
    async with open_shard(shard, s3_credentials(shard.s3)) as running:
        show_agent_logs(running.agent_name)
        artifact = await acreate_progress_artifact(
            progress=0.0, key=f"{shard.run_id}-rollouts", description=shard.name
        )

        async def show(done: int, expected: int) -> None:
            await aupdate_progress_artifact(artifact, progress=100.0 * done / expected)

        async with running.flushing(on_flush=show):
            try:
                await _run_all(running)
            finally:
                await show_failed(running)
        return ShardSummary(claim=shard.claim, kinds=running.kinds())


async def _run_all(shard: Shard) -> None:
    """Run every rollout of the shard; the first error ends the others and goes on."""
    try:
        async with asyncio.TaskGroup() as group:
            for index in shard.indices:
                group.create_task(_run(shard, index))
    except* AglError as errors:
        first = errors.exceptions[0]
    else:
        return
    raise first


async def _run(shard: Shard, index: int) -> None:
    """Run one rollout to its last attempt."""
    task: Any = rollout_task(shard.ref.failures)
    async with shard.turn(index):
        state = await task(index, shard.rollout_id(index), return_state=True)
    if not shard.has_outcome(index):
        raise LedgerError(f"rollout {index} ended without an outcome: {state.message}")
    shard.finish(index, str(state.state_details.task_run_id))
