"""Stage `publish`: write what the rollouts are given, and have the model server answer with it."""

from agl_core import progress
from agl_core.ledger.stages import StageRecord
from agl_core.types.training import PolicyRef
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task
from tasks.propose import TRAIN_SET, open_set, read_proposal


@ledger_task(name="publish", task_run_name="publish")
def publish(ref: IterationRef) -> StageRecord:
    """Write requests and resources of the training rollouts."""
    iteration = ref.open()
    if record := iteration.record("publish"):
        return record
    progress.report(progress.StageStarted(ref.iteration, "publish"))
    proposal = read_proposal(iteration)
    with iteration.stage("publish") as stage:
        open_set(ref, TRAIN_SET, proposal)
        stage.values |= {
            "policy_version": proposal.policy.version,
            "weights_digest": proposal.policy.weights_digest,
            "sampling_parameters": proposal.sampling_parameters,
        }
    return iteration.finished("publish")


@ledger_task(name="serve", task_run_name="serve-{policy.version}")
def serve(policy: PolicyRef) -> None:
    """Have the model server answer with a policy; returns once its weights' digest was seen
    there.
    """
    services = context.current()
    services.server.serve(policy, services.run.ledger.storage)
