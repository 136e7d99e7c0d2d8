from typing import Any

import numpy as np
import pytest

from agl_core.adapter.columns import spans_to_triplets
from agl_core.failures import FailureSettings
from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.failed import failed_groups, rewarded_outcomes
from agl_core.trajectory.settings import BatchSettings
from tests.builders import make_call, make_outcomes, make_requests, make_spans

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


@pytest.mark.parametrize(
    ("kind", "groups"), [("timeout", [1]), ("no_reward", [0]), ("infra_error", [])]
)
def test_a_failure_that_drops_its_group_names_it(kind: str, groups: list[int]):
    chosen = settings(**{kind: {"then": "drop_group"}})
    assert failed_groups(OUTCOMES, GROUPS, chosen).tolist() == groups


def test_only_the_attempt_that_decides_drops_a_group():
    outcomes = make_outcomes(
        {"index": 0, "kind": "timeout", "final": False}, {"index": 0, "attempt": 2}, {"index": 1}
    )
    chosen = settings(timeout={"then": "drop_group"})
    assert failed_groups(outcomes, GROUPS, chosen).tolist() == []


def test_every_row_of_a_failed_group_is_dropped_unless_it_has_a_reason_of_its_own():
    spans = make_spans(*(make_call(index) for index in range(4)), make_call(1, call_index=1))
    outcomes = make_outcomes(*({"index": index} for index in range(4)))
    triplets = spans_to_triplets(spans, outcomes, GROUPS)
    rules = BatchSettings(max_prompt_length=9, max_response_length=9, temperature=1.0)
    rows = build_batch(triplets, rules, failed_groups=np.array([0])).rows
    assert rows["drop_reason"].to_pylist() == ["group_failed"] * 3 + [None] * 2
    short = rules.model_copy(update={"max_response_length": 1})
    rows = build_batch(triplets, short, failed_groups=np.array([0])).rows
    assert set(rows["drop_reason"].to_pylist()) == {"response_too_long"}
