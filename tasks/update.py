"""Stages `update` and `export`: let the algorithm learn, then write the next version."""

from agl_core.ledger.stages import StageRecord
from agl_core.stages import update as stage
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="update", task_run_name="update")
async def update(ref: IterationRef) -> StageRecord:
    """Run one update step (`agl_core.stages.update`)."""
    return await stage.update(context.current().run, ref.open())


@ledger_task(name="export", task_run_name="export")
async def export(ref: IterationRef) -> StageRecord:
    """Write the policy version that the update made, if it made one."""
    return await stage.export(context.current().run, ref.open())
