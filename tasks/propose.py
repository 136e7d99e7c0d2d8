"""Stage `propose`: ask the algorithm for the next rollouts."""

from typing import Any

from agl_core import progress
from agl_core.ledger.requests import requests_table
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.types.training import Proposal
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task

TRAIN_SET = "train"


@ledger_task(name="propose", task_run_name="propose")
def propose(ref: IterationRef) -> StageRecord:
    """Write the proposal and the state it came from; a rerun finds them."""
    iteration = ref.open()
    if record := iteration.record("propose"):
        return record
    progress.report(progress.StageStarted(ref.iteration, "propose"))
    algorithm = context.current().run.algorithm
    state = state_before(iteration)
    proposal = algorithm.propose(state)
    with iteration.stage("propose") as stage:
        stage.put_json("state", state.model_dump(mode="json"))
        stage.put_json("proposal", proposal.model_dump(mode="json"))
        stage.values |= {
            "policy_in": proposal.policy.model_dump(mode="json"),
            "expected": len(proposal.requests),
        }
    return iteration.finished("propose")


def state_before(iteration: IterationLedger) -> Any:
    """Return the algorithm's state before an iteration: the start, or what the last manifest
    says.
    """
    return context.current().run.state_after(iteration.iteration)


def read_proposal(iteration: IterationLedger) -> Proposal:
    """Return the recorded proposal of an iteration."""
    key = iteration.finished("propose").file("proposal").key
    return Proposal.model_validate_json(iteration.storage.read(key))


def open_set(ref: IterationRef, name: str, proposal: Proposal) -> RolloutSet:
    """Return a set of rollouts with its requests and resources written."""
    iteration = ref.open()
    run = context.current().run
    rollouts = RolloutSet(iteration, name)
    table = requests_table(
        proposal,
        run.inputs,
        run_id=ref.run_id,
        iteration=ref.iteration,
        rollout_set=name,
        seed=run.config.seed,
    )
    rollouts.write_requests(table, proposal.policy, proposal.sampling_parameters)
    return rollouts
