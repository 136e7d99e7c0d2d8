"""Coverage counted again from the records: requests, what the shards flushed, and the batch."""

import pyarrow as pa

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.manifest import RewardSummary
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.ledger.tables import BATCH_ROWS, OUTCOMES
from agl_core.trajectory.coverage import rollout_coverage, row_coverage
from agl_core.types.outcome import Coverage, FailureKind, RowCoverage

_END = ["index", "attempt_id", "kind", "reward"]
"""What of an attempt decides a rollout."""


def recount(
    iteration: IterationLedger, collected: StageRecord, adapted: StageRecord
) -> tuple[Coverage, RowCoverage]:
    """Return what became of an iteration's rollouts and rows, whatever its stages said.

    Args:
        iteration: The iteration.
        collected: Record of its stage `collect`.
        adapted: Record of its stage `adapt`.

    Raises:
        LedgerError: The collected outcomes are not those that the shards flushed, or the records
            contradict each other.
    """
    expected, outcomes = check_collected(iteration, collected)
    columns = ["index", "response_mask", "drop_reason"]
    rows = files.read_table(iteration.storage, adapted.file("batch").key, BATCH_ROWS, columns)
    try:
        return rollout_coverage(expected, outcomes, rows), row_coverage(rows)
    except ValueError as error:
        raise LedgerError(f"iteration {iteration.iteration}: {error}") from error


def check_collected(iteration: IterationLedger, collected: StageRecord) -> tuple[int, pa.Table]:
    """Return the number of requests of a collected set, and every attempt that its shards flushed.

    Raises:
        LedgerError: Outcomes are missing or others, or the summary does not add up.
    """
    rollouts = RolloutSet(iteration, collected.values["rollout_set"])
    flushed = rollouts.outcomes()
    key = collected.file("outcomes").key
    stated = files.read_table(iteration.storage, key, OUTCOMES, [*_END, "final"])
    ends = [
        table.filter(table["final"]).select(_END).sort_by("index").combine_chunks()
        for table in (flushed, stated)
    ]
    if not ends[0].equals(ends[1]):
        raise LedgerError(f"{key} has other outcomes than the shards flushed for {rollouts.name}")
    summary = RewardSummary.model_validate(collected.values["rewards"])
    expected = len(rollouts.read_requests(["index"]))
    rewarded = ends[0]["kind"].to_pylist().count(FailureKind.SUCCEEDED.value)
    if (summary.expected, summary.rewarded) != (expected, rewarded) or expected != (
        rewarded + sum(summary.failures.values())
    ):
        raise LedgerError(
            f"{key}: {expected} rollouts were expected and {rewarded} have a reward; the stage "
            f"states {summary.expected}, {summary.rewarded} and failures {summary.failures}"
        )
    return expected, flushed
