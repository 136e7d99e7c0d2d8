from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.coverage import (
    call_coverage,
    rollout_coverage,
    row_coverage,
    summarise_rewards,
)
from agl_core.types.outcome import CallCoverage, Coverage
from tests.builders import make_outcomes, make_rows

OUTCOMES = make_outcomes(
    {"index": 0, "reward": 1.0},
    {"index": 1, "reward": 0.0},
    {"index": 2, "kind": "infra_error", "reward": None, "final": False},
    {"index": 2, "attempt": 2, "kind": "timeout", "reward": None},
    {"index": 3, "reward": 1.0},
)


def test_each_rollout_is_counted_once_with_its_reason():
    rows = make_rows([0, 0, 1, 3], [None, "prompt_too_long", None, "group_too_small"])
    coverage = rollout_coverage(4, OUTCOMES, rows)
    assert coverage == Coverage(
        expected=4,
        trained=2,
        masked=0,
        filtered=1,
        failed=1,
        omitted=0,
        unknown=0,
        reasons={"group_too_small": 1, "timeout": 1},
    )


def test_a_rollout_without_any_record_is_unknown():
    assert rollout_coverage(9, OUTCOMES, make_rows([0, 1, 3], [None] * 3)).unknown == 5
    assert rollout_coverage(4, OUTCOMES, make_rows([], [])).unknown == 3


def with_masks(rows: pa.Table, *masks: list[int]) -> pa.Table:
    column = rows.schema.get_field_index("response_mask")
    field = rows.schema.field(column)
    return rows.set_column(column, field, pa.array(masks, field.type))


def test_a_rollout_without_a_weighted_token_is_masked():
    outcomes = make_outcomes(*({"index": index} for index in range(4)))
    rows = make_rows([0, 0, 1, 2, 2, 3], [None, None, None, "prompt_too_long", None, "unfinished"])
    masked = with_masks(rows, [0, 0], [0, 1], [0, 0], [1, 1], [], [0, 0])
    coverage = rollout_coverage(4, outcomes, masked)
    assert (coverage.trained, coverage.masked, coverage.filtered) == (1, 2, 1)
    assert coverage.reasons == {"unfinished": 1}
    counted = row_coverage(masked)
    assert (counted.built, counted.trained, counted.masked) == (6, 1, 3)
    assert counted.dropped == {"prompt_too_long": 1, "unfinished": 1}


def test_every_sampled_call_is_in_a_row_or_has_a_reason():
    rows = make_rows([0, 0, 1, 2], [None, "unfinished", None, "prompt_too_long"])
    masked = with_masks(rows, [1], [1], [0], [1])
    place = rows.schema.get_field_index("num_calls")
    several = masked.set_column(place, rows.schema.field(place), pa.array([3, 1, 2, 1], pa.int32()))
    calls = call_coverage(9, several)
    assert (calls.sampled, calls.trained, calls.masked) == (9, 3, 2)
    assert calls.dropped == {"unfinished": 1, "prompt_too_long": 1, "no_token_ids": 2}
    with pytest.raises(ValueError, match="7 calls are in rows, 6 were sampled"):
        call_coverage(6, several)
    with pytest.raises(ValidationError, match="call coverage does not add up"):
        CallCoverage(sampled=2, trained=1, masked=0, dropped={})


def test_a_reward_by_policy_is_counted_and_its_failure_is_not():
    outcomes = make_outcomes(
        {"index": 0},
        {"index": 1, "kind": "no_reward", "reward": None},
        {"index": 2, "kind": "no_reward", "reward": None},
    )
    trained = rollout_coverage(3, outcomes, make_rows([0, 1], [None, None]))
    assert (trained.trained, trained.failed, trained.rewards_by_policy) == (2, 1, 1)
    assert trained.reasons == {"no_reward": 1}


@pytest.mark.parametrize(
    ("outcomes", "indices", "message"),
    [
        (({"index": 0}, {"index": 0, "attempt": 2}), [], "rollout 0 has more than one final"),
        (({"index": 0}, {"index": 7}), [], "rollout 7 ended; 2 were expected"),
        (({"index": 0},), [1], "rollout 1 has batch rows and did not end with a reward"),
        (({"index": 1, "kind": "timeout"},), [1], "rollout 1 has batch rows and did not end"),
    ],
)
def test_records_that_contradict_each_other_are_refused(
    outcomes: tuple[dict[str, Any], ...], indices: list[int], message: str
):
    rows = make_rows(indices, [None] * len(indices))
    with pytest.raises(ValueError, match=message):
        rollout_coverage(2, make_outcomes(*outcomes), rows)


ENDS = ("succeeded", "timeout", "no_reward")
ROWS = st.tuples(st.sampled_from([None, "prompt_too_long"]), st.lists(st.sampled_from([0, 1])))


@given(st.lists(st.tuples(st.sampled_from(ENDS), st.lists(ROWS, max_size=3)), max_size=8))
def test_coverage_agrees_with_plain_loops(rollouts: list[tuple[str, list[Any]]]):
    rollouts = [(end, [] if end == "timeout" else rows) for end, rows in rollouts]
    outcomes = make_outcomes(*({"index": i, "kind": end} for i, (end, _) in enumerate(rollouts)))
    flat = [(i, *row) for i, (_, rows) in enumerate(rollouts) for row in rows]
    table = with_masks(
        make_rows([i for i, _, _ in flat], [why for _, why, _ in flat]), *(m for _, _, m in flat)
    )
    found = rollout_coverage(len(rollouts), outcomes, table)
    counts = dict.fromkeys(("trained", "masked", "filtered", "failed", "unknown"), 0)
    for end, rows in rollouts:
        kept = [mask for why, mask in rows if why is None]
        if any(1 in mask for mask in kept):
            counts["trained"] += 1
        elif kept:
            counts["masked"] += 1
        elif rows:
            counts["filtered"] += 1
        else:
            counts["unknown" if end == "succeeded" else "failed"] += 1
    assert {name: getattr(found, name) for name in counts} == counts
    assert found.rewards_by_policy == sum(e == "no_reward" and bool(r) for e, r in rollouts)


def test_counts_that_do_not_add_up_are_refused():
    with pytest.raises(ValidationError, match="does not add up: expected 3, accounted for 2"):
        Coverage(
            expected=3, trained=1, masked=0, filtered=0, failed=1, omitted=0, unknown=0, reasons={}
        )


def test_rows_are_counted_by_reason():
    rows = row_coverage(make_rows([0, 0, 1], [None, "prompt_too_long", None]))
    assert (rows.built, rows.trained, rows.dropped) == (3, 2, {"prompt_too_long": 1})


def test_a_failed_rollout_is_not_a_reward_of_zero():
    summary = summarise_rewards(
        4,
        OUTCOMES,
        [{"tool": 1.0}, {"tool": 0.0}, {}],
        pass_reward=1.0,
        policy_version="v000000",
    )
    assert summary.rewarded == 3
    assert summary.mean_reward == pytest.approx(2 / 3)
    assert summary.pass_rate == pytest.approx(2 / 3)
    assert summary.failures == {"timeout": 1}
    assert summary.attempts == {"succeeded": 3, "infra_error": 1, "timeout": 1}
    assert summary.annotations == {"tool": 0.5}


def test_no_rewards_have_no_mean():
    outcomes = make_outcomes({"index": 0, "kind": "no_reward", "reward": None})
    summary = summarise_rewards(1, outcomes, [], pass_reward=1.0, policy_version="v000000")
    assert summary.mean_reward is None
    assert summary.pass_rate is None


def test_a_rollout_whose_rows_have_no_weight_is_masked():
    rows = make_rows([0, 0, 1, 1], [None, None, None, None]).to_pylist()
    masks = [[0, 0], [0], [0], [1]]
    table = pa.Table.from_pylist(
        [row | {"response_mask": mask} for row, mask in zip(rows, masks, strict=True)],
        schema=BATCH_ROWS,
    )
    coverage = rollout_coverage(2, make_outcomes({"index": 0}, {"index": 1}), table)
    assert (coverage.trained, coverage.masked, coverage.filtered) == (1, 1, 0)
