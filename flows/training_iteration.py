"""One iteration: propose, publish, roll out, collect, adapt, update, export, evaluate, commit."""

from prefect import flow
from prefect.runtime import flow_run

from agl_core.stages.commit import report_committed
from agl_core.stages.propose import TRAIN_SET, open_validation, state_before
from agl_core.stages.update import read_state
from agl_core.types.training import PolicyRef
from flows.failure import fails_in_one_sentence
from flows.fan_out import roll_out
from flows.patience import patiently
from tasks import context
from tasks.adapt import adapt
from tasks.collect import collect
from tasks.commit import commit
from tasks.context import IterationRef
from tasks.logs import show_logs
from tasks.propose import propose
from tasks.publish import publish
from tasks.report import report
from tasks.update import export, update


@flow(
    name="training-iteration",
    flow_run_name="{ref.run_id}-{ref.iteration:06d}",
    persist_result=False,
)
@fails_in_one_sentence
async def training_iteration(ref: IterationRef) -> str:
    """Run one iteration to its manifest and return the manifest's key; finished stages are not
    repeated.

    Inside `training_run` it uses that run's services; started on its own (a retry, say), it opens
    the run from its ledger and rebuilds the update worker from the last checkpoint. Failed rollouts
    of stages that are not recorded then run again, as unfinished ones do.

    Raises:
        ConfigError: Started on its own: the iteration is committed, or not the next one.
        RunCancelled: It was cancelled.
    """
    show_logs()
    async with context.opened_for(ref):
        run, iteration = context.current().run, ref.open()
        proposed = propose(ref)
        policy = PolicyRef.model_validate(proposed.values["policy_in"])
        publish(ref)
        if ref.iteration == 0:
            await evaluate(ref, state_before(run, iteration), "rollout_base", "evaluate_base")

        await roll_out(ref, "rollout", TRAIN_SET, policy)
        collect(ref, TRAIN_SET, policy)
        adapt(ref)
        await update(ref)
        await export(ref)
        await evaluate(ref, read_state(run, iteration, "export"), "rollout_new", "evaluate")

        key = commit(ref, {"flow_run_id": flow_run.id})
        await patiently(lambda: report(ref))
        report_committed(iteration)
        return key


async def evaluate(ref: IterationRef, state: object, rollout_stage: str, stage: str) -> None:
    """Score a state's policy on the validation set, if there is one."""
    rollouts = open_validation(context.current().run, ref.open(), state)
    if rollouts is None:
        return
    policy = rollouts.read_resources().policy
    await roll_out(ref, rollout_stage, rollouts.name, policy)
    collect(ref, rollouts.name, policy, stage)
