"""Stages `collect`, `evaluate_base` and `evaluate`: one table of attempts and one of spans for a
set of rollouts.
"""

from agl_core import progress
from agl_core.ledger.collect import collect_set
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import StageRecord
from agl_core.types.training import PolicyRef
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="collect", task_run_name="{stage_name}-{rollout_set}")
def collect(
    ref: IterationRef, rollout_set: str, policy: PolicyRef, stage_name: str = "collect"
) -> StageRecord:
    """Gather a set whose rollouts have all ended."""
    iteration = ref.open()
    if record := iteration.record(stage_name):
        return record
    progress.report(progress.StageStarted(ref.iteration, stage_name))
    pass_reward = context.current().run.config.pass_reward
    with iteration.stage(stage_name) as stage:
        rollouts = RolloutSet(iteration, rollout_set)
        summary = collect_set(rollouts, stage, policy, pass_reward)
        stage.values |= {"rewards": summary.model_dump(mode="json"), "rollout_set": rollout_set}
    return iteration.finished(stage_name)
