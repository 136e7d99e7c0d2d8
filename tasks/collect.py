"""Stages `collect`, `evaluate_base` and `evaluate`: what the rollouts of a set left."""

from agl_core.ledger.stages import StageRecord
from agl_core.stages import collect as stage
from agl_core.types.training import PolicyRef
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="collect", task_run_name="{stage_name}-{rollout_set}")
def collect(
    ref: IterationRef, rollout_set: str, policy: PolicyRef, stage_name: str = "collect"
) -> StageRecord:
    """Gather a set whose rollouts have all ended."""
    return stage.collect(context.current().run, ref.open(), rollout_set, policy, stage_name)
