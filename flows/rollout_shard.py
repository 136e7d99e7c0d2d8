"""The rollouts of one runner: one task run each, flushed to the ledger as they finish."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict

from agl_core.errors import AglError, LedgerError, RunCancelled
from agl_core.ledger.run import open_run
from agl_core.ledger.s3_access import S3Access, S3Credentials
from agl_core.runner.shard import Shard, ShardRef, open_shard
from agl_core.runner.shard_retry import retry_shard
from agl_core.runner.shard_watch import ShardWatch
from flows.failure import fails_in_one_sentence
from flows.patience import patiently
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

    A shard whose flow run is started again (a retry in the UI) takes what is unfinished or failed
    of its claim under a new one, unless another shard has replaced it.

    Raises:
        IterationStopped: More rollouts failed than the run permits; those that ran were cancelled.
        ConfigError: It is retried after its rollouts were recorded, or without its model server.
        RunCancelled: The run that it belongs to is over, or it was given up.
        LedgerError: A rollout ended without a recorded outcome, or the ledger cannot be written.
    """
    show_logs()
    credentials = s3_credentials(shard.s3)
    is_retry = (flow_run.run_count or 1) > 1
    if is_retry:
        retried = await asyncio.to_thread(retry_shard, shard, credentials)
        if retried is None:
            return ShardSummary(claim=shard.claim, kinds={})
        shard = retried
    watched = _watched(shard, credentials, is_retry=is_retry)
    async with watched, open_shard(shard, credentials) as running:
        show_agent_logs(running.agent_name)
        artifact = await patiently(
            lambda: acreate_progress_artifact(
                progress=0.0, key=f"{shard.run_id}-rollouts", description=shard.name
            )
        )

        async def show(done: int, expected: int) -> None:
            await aupdate_progress_artifact(artifact, progress=100.0 * done / expected)

        async with running.flushing(on_flush=show):
            try:
                await _run_all(running)
            finally:
                await show_failed(running)
        return ShardSummary(claim=shard.claim, kinds=running.kinds())


@asynccontextmanager
async def _watched(
    shard: ShardRef, credentials: S3Credentials | None, *, is_retry: bool
) -> AsyncGenerator[None]:
    """Give signs of life, and stop when the run is over; in process the run sees to both itself."""
    if shard.settings.deployment is None:
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    access = S3Access(shard.s3, credentials)
    ledger = open_run(shard.ledger, shard.run_id, access, conditional_put=shard.conditional_put)
    watch = ShardWatch(
        ledger.starts,
        shard.start,
        shard.key,
        is_retry=is_retry,
        on_stop=lambda: loop.call_soon_threadsafe(task.cancel),
    )
    await asyncio.to_thread(watch.start)
    try:
        yield
    except asyncio.CancelledError as error:
        if not watch.reason:
            raise
        raise RunCancelled(f"shard {shard.name} stopped: {watch.reason}") from error
    finally:
        watch.stop()


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
