"""Stages `propose` and `publish`: ask the algorithm for the next rollouts, and write what they are
given.
"""

from pathlib import Path
from typing import Any

from agl_core import progress
from agl_core.ledger import files
from agl_core.ledger.requests import requests_table
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.prepared import PreparedRun
from agl_core.trajectory.vocabulary import find_vocabulary_size
from agl_core.types.training import Proposal

TRAIN_SET = "train"


def propose(run: PreparedRun, iteration: IterationLedger) -> StageRecord:
    """Write the proposal and the state it came from; a rerun finds them."""
    if record := iteration.record("propose"):
        return record
    progress.report(progress.StageStarted(iteration.iteration, "propose"))
    state = state_before(run, iteration)
    proposal = run.algorithm.propose(state)
    with iteration.stage("propose") as stage:
        stage.put_json("state", state.model_dump(mode="json"))
        stage.put_json("proposal", proposal.model_dump(mode="json"))
        stage.values |= {
            "policy_in": proposal.policy.model_dump(mode="json"),
            "expected": len(proposal.requests),
        }
    return iteration.finished("propose")


def state_before(run: PreparedRun, iteration: IterationLedger) -> Any:
    """Return the algorithm's state before an iteration: the start, or what the last manifest
    says.
    """
    return run.state_after(iteration.iteration)


def read_proposal(iteration: IterationLedger) -> Proposal:
    """Return the recorded proposal of an iteration."""
    file = iteration.finished("propose").file("proposal")
    return files.read_model(iteration.storage, file, Proposal)


def publish(run: PreparedRun, iteration: IterationLedger) -> StageRecord:
    """Write requests and resources of the training rollouts."""
    if record := iteration.record("publish"):
        return record
    progress.report(progress.StageStarted(iteration.iteration, "publish"))
    proposal = read_proposal(iteration)
    with iteration.stage("publish") as stage:
        open_set(run, iteration, TRAIN_SET, proposal)
        stage.values |= {
            "policy_version": proposal.policy.version,
            "weights_digest": proposal.policy.weights_digest,
            "sampling_parameters": proposal.sampling_parameters,
        }
    return iteration.finished("publish")


def open_set(
    run: PreparedRun, iteration: IterationLedger, name: str, proposal: Proposal
) -> RolloutSet:
    """Return a set of rollouts with its requests and resources written."""
    rollouts = RolloutSet(iteration, name)
    table = requests_table(
        proposal,
        run.inputs,
        run_id=iteration.run_id,
        iteration=iteration.iteration,
        rollout_set=name,
        seed=run.config.seed,
    )
    size = find_vocabulary_size(Path(run.algorithm.model_path).expanduser())
    rollouts.write_requests(table, proposal.policy, proposal.sampling_parameters, size)
    return rollouts


def open_validation(run: PreparedRun, iteration: IterationLedger, state: Any) -> RolloutSet | None:
    """Return the rollouts that score a state's policy, written; None where nothing is validated."""
    proposal = run.algorithm.validation(state)
    if proposal is None:
        return None
    return open_set(run, iteration, f"val-{proposal.policy.version}", proposal)
