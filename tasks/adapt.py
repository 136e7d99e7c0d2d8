"""Stage `adapt`: spans to triplets, triplets to batch rows."""

from agl_core.ledger.stages import StageRecord
from agl_core.stages import adapt as stage
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="adapt", task_run_name="adapt")
def adapt(ref: IterationRef) -> StageRecord:
    """Make rows of the collected spans (`agl_core.stages.adapt`)."""
    return stage.adapt(context.current().run, ref.open())
