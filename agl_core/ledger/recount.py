"""What stages state of their outputs, counted again from the files: rewards from what the shards
flushed, coverage and tokens from the batch and the rows that the update itself dropped, breaks,
means of the update's metrics, the policy that was proposed.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.manifest import RewardSummary
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.ledger.storage import Storage
from agl_core.ledger.tables import (
    BATCH_ROWS,
    BREAKS,
    OUTCOMES,
    TRIPLETS,
    UPDATE_METRICS,
    UPDATE_ROWS,
)
from agl_core.trajectory.breaks import count_breaks
from agl_core.trajectory.coverage import (
    call_coverage,
    rollout_coverage,
    row_coverage,
    summarise_rewards,
)
from agl_core.trajectory.tokens import recount_tokens
from agl_core.types.outcome import (
    CallCoverage,
    Coverage,
    DropReason,
    RowCoverage,
    TokenCoverage,
)
from agl_core.types.training import FileRef, PolicyRef, Proposal

_END = ["index", "attempt_id", "kind", "reward"]
"""What of an attempt decides a rollout."""


class Recount(NamedTuple):
    """What became of an iteration's rollouts, rows and model calls."""

    coverage: Coverage
    rows: RowCoverage
    calls: CallCoverage | None
    """None in an iteration of before they were counted."""


def recount(
    iteration: IterationLedger,
    collected: StageRecord,
    adapted: StageRecord,
    updated: StageRecord,
    pass_reward: float,
) -> tuple[Recount, Recount]:
    """Return what became of an iteration's rollouts and rows, whatever its stages said: as the
    batch was built, and after the update, which may drop rows of its own.

    Args:
        iteration: The iteration.
        collected: Record of its stage `collect`.
        adapted: Record of its stage `adapt`.
        updated: Record of its stage `update`.
        pass_reward: The run's.

    Raises:
        LedgerError: The collected outcomes are not those that the shards flushed, or the records
            contradict each other.
    """
    expected, outcomes = check_collected(iteration, collected, pass_reward)
    columns = ["row", "index", "response_mask", "drop_reason"]
    counts_calls = "calls" in adapted.values
    columns += ["num_calls"] if counts_calls else []
    built = files.read_table(iteration.storage, adapted.file("batch"), BATCH_ROWS, columns)
    left = _without_dropped(iteration.storage, built, updated)
    triplets = files.read_table(iteration.storage, adapted.file("triplets"), TRIPLETS, ["index"])
    try:
        before, after = (
            Recount(
                rollout_coverage(expected, outcomes, rows),
                row_coverage(rows),
                call_coverage(len(triplets), rows) if counts_calls else None,
            )
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
    if not isinstance(ref, FileRef):
        return rows
    with files.open_table(storage, ref, UPDATE_ROWS) as table:
        if table.version < 2:
            return rows
        named = table.read(["row", "drop_reason"])
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


def check_collected(
    iteration: IterationLedger, collected: StageRecord, pass_reward: float
) -> tuple[int, pa.Table]:
    """Return the number of requests of a collected set, and every attempt that its shards flushed.

    Args:
        iteration: The iteration.
        collected: Record of the stage that collected.
        pass_reward: The run's, for records of before the stage stated its own.

    Raises:
        LedgerError: Outcomes are missing or others, or the summary is not theirs.
    """
    rollouts = RolloutSet.recorded(iteration, collected.values["rollout_set"])
    flushed = rollouts.outcomes()
    file = collected.file("outcomes")
    stated = files.read_table(iteration.storage, file, OUTCOMES)
    ends = [_ends(table, whole=rollouts.is_recorded) for table in (flushed, stated)]
    if not ends[0].equals(ends[1]):
        raise LedgerError(
            f"{file.key} has other outcomes than the shards flushed for {rollouts.name}"
        )
    expected = len(rollouts.read_requests(["index"]))
    summary = RewardSummary.model_validate(collected.values["rewards"])
    counted = summarise_set(
        expected,
        flushed if rollouts.is_recorded else stated,
        collected.values.get("pass_reward", pass_reward),
        rollouts.read_resources().policy.version,
    )
    if summary != counted:
        raise LedgerError(
            f"{file.key}: {expected} rollouts were expected and {counted.rewarded} have a reward; "
            f"counted again the rewards are {counted}; stage {collected.stage} states {summary}"
        )
    return expected, flushed


def _ends(table: pa.Table, *, whole: bool) -> pa.Table:
    """Return what decides the rollouts, or the whole table, in an order of its own."""
    if not whole:
        table = table.filter(table["final"]).select(_END)
    return table.sort_by([("index", "ascending"), ("attempt_id", "ascending")]).combine_chunks()


def summarise_set(
    expected: int, outcomes: pa.Table, pass_reward: float, policy_version: str
) -> RewardSummary:
    """Summarise the rewards of a set, what agents noted among them.

    Args:
        expected: Number of requests.
        outcomes: Schema `OUTCOMES`, every attempt.
        pass_reward: A rollout passes from this reward on.
        policy_version: The policy that was sampled.
    """
    final = outcomes.filter(outcomes["final"])
    notes: list[dict[str, Any]] = [json.loads(text) for text in final["annotations"].to_pylist()]
    return summarise_rewards(
        expected, outcomes, notes, pass_reward=pass_reward, policy_version=policy_version
    )


def mean_metrics(storage: Storage, metrics: FileRef) -> dict[str, float]:
    """Return each update metric's mean over the optimizer steps."""
    table = files.read_table(storage, metrics, UPDATE_METRICS, ["name", "value"])
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in zip(table["name"].to_pylist(), table["value"].to_pylist(), strict=True):
        values[name].append(value)
    return {name: fmean(found) for name, found in sorted(values.items())}


def check_stated(iteration: IterationLedger, stages: Mapping[str, StageRecord]) -> None:
    """Compare tokens, breaks, metrics and the proposed policy with what the files give.

    Raises:
        LedgerError: A stage states something else.
    """
    storage, adapted, updated = iteration.storage, stages["adapt"], stages["update"]
    stated = adapted.values
    if "tokens" in stated:
        with files.open_table(storage, adapted.file("triplets"), TRIPLETS) as table:
            counted = ["output_tokens"] if table.version >= 3 else []
            triplets = table.read(["response_ids", *counted])
        columns = ["response_ids", "policy_versions", "response_mask", "drop_reason"]
        rows = files.read_table(storage, adapted.file("batch"), BATCH_ROWS, columns)
        _compare(
            iteration,
            "adapt",
            "tokens",
            TokenCoverage.model_validate(stated["tokens"]),
            recount_tokens(triplets, rows),
        )
    if "breaks" in adapted.outputs:
        table = files.read_table(storage, adapted.file("breaks"), BREAKS, ["kind"])
        _compare(iteration, "adapt", "breaks", stated["breaks"], count_breaks(table))
    if isinstance(metrics := updated.outputs.get("update_metrics"), FileRef):
        means = mean_metrics(storage, metrics)
        _compare(iteration, "update", "metrics", updated.values.get("metrics"), means)
    proposed = stages["propose"]
    if "proposal" in proposed.outputs:
        proposal = files.read_model(storage, proposed.file("proposal"), Proposal)
        policy = PolicyRef.model_validate(proposed.values["policy_in"])
        _compare(iteration, "propose", "policy_in", policy, proposal.policy)


def _compare(
    iteration: IterationLedger, stage: str, name: str, stated: object, counted: object
) -> None:
    if stated != counted:
        raise LedgerError(
            f"iteration {iteration.iteration}: stage {stage} states {name} {stated}, its files say "
            f"{counted}"
        )
