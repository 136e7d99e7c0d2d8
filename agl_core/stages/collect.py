"""Stages `collect`, `evaluate_base` and `evaluate`: one table of attempts and one of spans for a
set of rollouts.
"""

from agl_core import progress
from agl_core.ledger.collect import collect_set
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.prepared import PreparedRun
from agl_core.types.training import PolicyRef


def collect(
    run: PreparedRun,
    iteration: IterationLedger,
    rollout_set: str,
    policy: PolicyRef,
    stage_name: str = "collect",
) -> StageRecord:
    """Gather a set whose rollouts have all ended."""
    if record := iteration.record(stage_name):
        return record
    progress.report(progress.StageStarted(iteration.iteration, stage_name))
    with iteration.stage(stage_name) as stage:
        rollouts = RolloutSet.recorded(iteration, rollout_set)
        summary = collect_set(rollouts, stage, policy, run.config.pass_reward)
        stage.values |= {
            "rewards": summary.model_dump(mode="json"),
            "rollout_set": rollout_set,
            "pass_reward": run.config.pass_reward,
        }
    return iteration.finished(stage_name)
