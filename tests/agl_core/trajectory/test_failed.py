from typing import Any

import pyarrow as pa
import pytest

from agl_core.adapter.columns import spans_to_triplets
from agl_core.failures import FailureSettings
from agl_core.trajectory.failed import drop_failed_groups, rewarded_outcomes
from tests.builders import make_call, make_outcomes, make_requests, make_rows, make_spans

OUTCOMES = make_outcomes(
    {"index": 0},
    {"index": 1, "kind": "no_reward", "reward": None},
    {"index": 2},
    {"index": 3, "kind": "timeout", "reward": None},
)
GROUPS = make_requests(4).select(["index", "group"])


def settings(**values: Any) -> FailureSettings:
    return FailureSettings.model_validate(values)


def test_a_missing_reward_is_zero_only_by_the_users_word_and_not_in_the_record():
    spans = make_spans(*(make_call(index) for index in range(4)))
    zero = settings(no_reward={"then": "zero"})
    for chosen, rewards in [(settings(), {0: 1.0, 2: 1.0}), (zero, {0: 1.0, 1: 0.0, 2: 1.0})]:
        triplets = spans_to_triplets(spans, rewarded_outcomes(OUTCOMES, chosen), GROUPS)
        found = zip(triplets["index"].to_pylist(), triplets["reward"].to_pylist(), strict=True)
        assert dict(found) == rewards
    assert OUTCOMES["kind"].to_pylist()[1] == "no_reward"
    assert OUTCOMES["reward"].to_pylist()[1] is None


def rows_of(*reasons: str | None) -> pa.Table:
    """Rows of the rollouts 0, 1 (group 0) and 2, 2 (group 1)."""
    rows = make_rows([0, 1, 2, 2], list(reasons))
    column = rows.schema.get_field_index("group")
    return rows.set_column(column, rows.schema.field(column), pa.array([0, 0, 1, 1], pa.int32()))


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        ("timeout", [None, None, "group_failed", "prompt_too_long"]),
        ("no_reward", ["group_failed", "group_failed", "group_too_small", "prompt_too_long"]),
        ("infra_error", [None, None, "group_too_small", "prompt_too_long"]),
    ],
)
def test_a_failure_that_drops_its_group_takes_every_row_of_it(kind: str, reasons: list[str | None]):
    rows = rows_of(None, None, "group_too_small", "prompt_too_long")
    dropped = drop_failed_groups(rows, OUTCOMES, GROUPS, settings(**{kind: {"then": "drop_group"}}))
    assert dropped["drop_reason"].to_pylist() == reasons
    assert dropped.schema == rows.schema


def test_only_the_attempt_that_decides_drops_a_group():
    outcomes = make_outcomes(
        {"index": 0, "kind": "timeout", "final": False}, {"index": 0, "attempt": 2}, {"index": 1}
    )
    chosen = settings(timeout={"then": "drop_group"})
    dropped = drop_failed_groups(rows_of(None, None, None, None), outcomes, GROUPS, chosen)
    assert dropped["drop_reason"].to_pylist() == [None] * 4
