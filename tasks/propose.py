"""Stage `propose`: ask the algorithm for the next rollouts."""

from agl_core.ledger.stages import StageRecord
from agl_core.stages import propose as stage
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="propose", task_run_name="propose")
def propose(ref: IterationRef) -> StageRecord:
    """Write the proposal and the state it came from; a rerun finds them."""
    return stage.propose(context.current().run, ref.open())
