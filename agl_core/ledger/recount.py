"""Coverage counted again from the records: requests, what the shards flushed, the batch, and the
rows that the update itself dropped.
"""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.manifest import RewardSummary
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.ledger.storage import Storage
from agl_core.ledger.tables import BATCH_ROWS, OUTCOMES, UPDATE_ROWS
from agl_core.trajectory.coverage import rollout_coverage, row_coverage
from agl_core.types.outcome import Coverage, DropReason, FailureKind, RowCoverage
from agl_core.types.training import FileRef

_END = ["index", "attempt_id", "kind", "reward"]
"""What of an attempt decides a rollout."""


class Recount(NamedTuple):
    """What became of an iteration's rollouts and rows."""

    coverage: Coverage
    rows: RowCoverage


def recount(
    iteration: IterationLedger, collected: StageRecord, adapted: StageRecord, updated: StageRecord
) -> tuple[Recount, Recount]:
    """Return what became of an iteration's rollouts and rows, whatever its stages said: as the
    batch was built, and after the update, which may drop rows of its own.

    Args:
        iteration: The iteration.
        collected: Record of its stage `collect`.
        adapted: Record of its stage `adapt`.
        updated: Record of its stage `update`.

    Raises:
        LedgerError: The collected outcomes are not those that the shards flushed, or the records
            contradict each other.
    """
    expected, outcomes = check_collected(iteration, collected)
    columns = ["row", "index", "response_mask", "drop_reason"]
    built = files.read_table(iteration.storage, adapted.file("batch").key, BATCH_ROWS, columns)
    left = _without_dropped(iteration.storage, built, updated)
    try:
        before, after = (
            Recount(rollout_coverage(expected, outcomes, rows), row_coverage(rows))
            for rows in (built, left)
        )
    except ValueError as error:
        raise LedgerError(f"iteration {iteration.iteration}: {error}") from error
    return before, after


def _without_dropped(storage: Storage, rows: pa.Table, updated: StageRecord) -> pa.Table:
    """Return the rows with the update's reasons added; rows without a weighted token are masked,
    whoever says so.
    """
    ref = updated.outputs.get("update_rows")
    if not isinstance(ref, FileRef) or files.read_version(storage, ref.key, UPDATE_ROWS) < 2:
        return rows
    named = files.read_table(storage, ref.key, UPDATE_ROWS, ["row", "drop_reason"])
    says_why = pc.and_(
        pc.is_valid(named["drop_reason"]),
        pc.not_equal(named["drop_reason"], DropReason.NO_WEIGHT.value),
    )
    dropped = named.filter(pc.fill_null(says_why, False))
    place = pc.index_in(rows["row"], value_set=dropped["row"].combine_chunks())
    reasons = pc.take(dropped["drop_reason"].combine_chunks(), place.combine_chunks())
    column = rows.schema.get_field_index("drop_reason")
    both = pc.coalesce(rows["drop_reason"], reasons)
    return rows.set_column(column, rows.schema.field(column), both)


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
