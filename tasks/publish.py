"""Stage `publish`: write what the rollouts are given, and have the model server answer with it."""

from agl_core.ledger.stages import StageRecord
from agl_core.stages import propose as stage
from agl_core.types.training import PolicyRef
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="publish", task_run_name="publish")
def publish(ref: IterationRef) -> StageRecord:
    """Write requests and resources of the training rollouts."""
    return stage.publish(context.current().run, ref.open())


@ledger_task(name="serve", task_run_name="serve-{policy.version}")
def serve(policy: PolicyRef) -> None:
    """Have the model server answer with a policy; returns once its weights' digest was seen
    there.
    """
    services = context.current()
    services.server.serve(policy, services.run.ledger.storage)
