"""Gather what the shards of a set flushed into one table of attempts and one of spans."""

import pyarrow as pa
import pyarrow.compute as pc

from agl_core import semconv
from agl_core.errors import TraceError
from agl_core.ledger.manifest import RewardSummary
from agl_core.ledger.recount import summarise_set
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import StageAttempt
from agl_core.ledger.tables import SPANS
from agl_core.types.training import PolicyRef


def collect_set(
    rollouts: RolloutSet, stage: StageAttempt, policy: PolicyRef, pass_reward: float
) -> RewardSummary:
    """Write `outcomes` (every attempt) and `spans` (of the claims that decide) to the stage.

    Spans are copied one flush at a time.

    Raises:
        TraceError: A model call was served by another version or other weights than the policy's
            (the proxy refuses such answers).
    """
    outcomes = rollouts.outcomes()
    stage.put_table("outcomes", outcomes)
    with stage.table("spans", SPANS) as writer:
        for spans in rollouts.iter_spans():
            _check_served(spans, policy)
            writer.append(spans)
    expected = len(rollouts.read_requests(["index"]))
    return summarise_set(expected, outcomes, pass_reward, policy.version)


def _check_served(spans: pa.Table, policy: PolicyRef) -> None:
    """Refuse answered calls that do not name the policy they should have come from."""
    answered = spans.filter(
        pc.and_(
            pc.equal(spans["name"], semconv.LLM_CALL_SPAN), pc.not_equal(spans["status"], "ERROR")
        )
    )
    expected = {"policy_version": policy.version, "weights_digest": policy.weights_digest}
    for column, value in expected.items():
        for found in pc.unique(answered[column]).to_pylist():
            if found != value:
                raise TraceError(
                    f"a model call was served by {column} {found}, the iteration uses {value}"
                )
