import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import semconv
from agl_core.adapter.columns import spans_to_triplets
from agl_core.errors import TraceError
from tests.builders import make_call, make_outcomes, make_requests, make_spans


def adapt(spans: pa.Table, outcomes: pa.Table) -> list[dict]:
    groups = make_requests(8).select(["index", "group"])
    return spans_to_triplets(spans, outcomes, groups).to_pylist()


def test_calls_become_triplets_in_chronological_order():
    spans = make_spans(
        make_call(3, 1, prompt_token_ids=[1, 2, 3, 9], response_token_ids=[7], logprobs=[-2.0]),
        make_call(2, 0),
        make_call(3, 0),
    )
    rows = adapt(spans, make_outcomes({"index": 2, "reward": 0.5}, {"index": 3, "reward": 0.0}))
    assert [(row["index"], row["call_index"], row["group"]) for row in rows] == [
        (2, 0, 1),
        (3, 0, 1),
        (3, 1, 1),
    ]
    assert [row["reward"] for row in rows] == [0.5, 0.0, 0.0]
    assert rows[2]["prompt_ids"] == [1, 2, 3, 9]
    assert rows[2]["response_ids"] == [7]
    assert rows[2]["logprobs"] == [-2.0]


def test_failed_rollouts_give_no_triplets_and_no_reward():
    outcomes = make_outcomes({"index": 0, "kind": "timeout", "reward": None}, {"index": 1})
    assert [row["index"] for row in adapt(make_spans(make_call(0), make_call(1)), outcomes)] == [1]


def test_only_the_deciding_attempt_counts():
    spans = make_spans(make_call(0), make_call(0, attempt_id="at-0-2", response_token_ids=[9, 9]))
    outcomes = make_outcomes(
        {"index": 0, "kind": "infra_error", "reward": None, "final": False},
        {"index": 0, "attempt": 2},
    )
    assert [row["response_ids"] for row in adapt(spans, outcomes)] == [[9, 9]]


def test_a_call_that_failed_is_left_out():
    failed = make_call(0, 0, status="ERROR", prompt_token_ids=None, response_token_ids=None)
    rows = adapt(make_spans(failed, make_call(0, 1)), make_outcomes({"index": 0}))
    assert [row["call_index"] for row in rows] == [1]


def test_other_spans_are_left_out():
    spans = make_spans(make_call(0), make_call(0, name="agentlightning.rollout"))
    assert len(adapt(spans, make_outcomes({"index": 0}))) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"response_token_ids": None}, "0 token ids and 2 log-probs"),
        ({"response_token_ids": []}, "0 token ids and 2 log-probs"),
        ({"logprobs": [-0.5]}, "2 token ids and 1 log-probs"),
        ({"prompt_token_ids": None}, "rollout ro-0: call 0"),
    ],
)
def test_a_call_without_matching_ids_is_an_error(overrides, message):
    spans = make_spans(make_call(0) | overrides)
    with pytest.raises(TraceError, match=message):
        adapt(spans, make_outcomes({"index": 0}))


def test_no_spans_give_no_triplets():
    assert adapt(make_spans(), make_outcomes({"index": 0, "kind": "no_trace"})) == []


def test_an_attempt_counts_for_its_own_rollout_only():
    """Attempt ids are short: a failed attempt of another rollout may have the same one."""
    same = {"attempt_id": "at-1"}
    outcomes = make_outcomes({"index": 0, **same}, {"index": 1, "kind": "timeout", **same})
    rows = adapt(make_spans(make_call(0, **same), make_call(1, **same)), outcomes)
    assert [row["index"] for row in rows] == [0]


def make_reward(
    index: int, time: float, *values: tuple[str, float], links: dict[str, str] | None = None
) -> dict[str, Any]:
    """A span of one emitted reward; the first value is the primary one."""
    attributes: dict[str, Any] = {}
    for number, (name, value) in enumerate(values):
        attributes[f"{semconv.REWARD_PREFIX}.{number}.name"] = name
        attributes[f"{semconv.REWARD_PREFIX}.{number}.value"] = value
    primary = attributes.pop(semconv.PRIMARY_REWARD_VALUE)
    for number, (name, value) in enumerate((links or {}).items()):
        attributes[f"{semconv.LINK_PREFIX}.{number}.key_match"] = name
        attributes[f"{semconv.LINK_PREFIX}.{number}.value_match"] = value
    no_call = ("call_index", "prompt_token_ids", "response_token_ids", "logprobs")
    return make_call(index) | {
        **dict.fromkeys(no_call),
        "name": semconv.ANNOTATION_SPAN,
        "span_id": bytes([index, int(time * 4), 0, 0, 0, 0, 1, 1]),
        "start_time": time,
        "end_time": time,
        "sequence_id": int(time * 4) + 100,
        "reward": primary,
        "attributes": json.dumps(attributes),
    }


def rewards_of(*spans: dict[str, Any], final: float) -> list[list[tuple]]:
    """Return name, value, final and matched of the rewards of each call."""
    rows = adapt(make_spans(*spans), make_outcomes({"index": 0, "reward": final}))
    assert {row["reward"] for row in rows} == {final}
    return [[(e["name"], e["value"], e["final"], e["matched"]) for e in r["rewards"]] for r in rows]


# Calls 0, 1 and 2 end at 0.5, 1.5 and 2.5.
CALLS = (make_call(0, 0), make_call(0, 1), make_call(0, 2))


def test_each_reward_belongs_to_the_call_that_it_follows_and_the_last_one_is_final():
    spans = (make_reward(0, 0.75, ("primary", 0.25)), make_reward(0, 3.0, ("primary", 1.0)))
    assert rewards_of(*spans, *CALLS, final=1.0) == [
        [("primary", 0.25, False, True)],
        [],
        [("primary", 1.0, True, True)],
    ]


def test_a_linked_reward_belongs_to_the_call_that_it_names():
    by_span = {"span_id": CALLS[1]["span_id"].hex()}
    by_response = {"gen_ai.response.id": "r-0"}
    spans = (
        make_reward(0, 2.75, ("primary", 0.25), links=by_span),
        make_reward(0, 2.75, ("primary", 0.5), links=by_response) | {"span_id": b"8 bytes."},
        make_reward(0, 3.0, ("primary", 1.0)),
    )
    first = CALLS[0] | {"response_id": "r-0"}
    assert rewards_of(*spans, first, *CALLS[1:], final=1.0) == [
        [("primary", 0.5, False, True)],
        [("primary", 0.25, False, True)],
        [("primary", 1.0, True, True)],
    ]


def test_every_dimension_of_a_reward_is_kept_and_the_first_is_primary():
    spans = make_spans(*CALLS, make_reward(0, 3.0, ("accuracy", 1.0), ("format", 0.5)))
    *_, last = adapt(spans, make_outcomes({"index": 0}))
    flags = {"final": True, "matched": True}
    assert last["rewards"] == [
        {"name": "accuracy", "value": 1.0, "primary": True, **flags},
        {"name": "format", "value": 0.5, "primary": False, **flags},
    ]


def test_a_reward_before_every_call_is_kept_as_one_of_no_call():
    early = make_reward(0, 0.0, ("primary", 0.25))
    spans = (early, make_reward(0, 3.0, ("primary", 1.0)))
    assert rewards_of(*spans, *CALLS, final=1.0)[0] == [("primary", 0.25, False, False)]


def test_the_recorded_outcome_is_the_final_reward_whatever_was_emitted_after_it():
    spans = (make_reward(0, 3.0, ("primary", 0.5)),)
    assert rewards_of(*spans, *CALLS, final=1.0)[-1] == [
        ("primary", 0.5, False, True),
        ("primary", 1.0, True, True),
    ]


def test_a_reward_that_no_span_holds_is_on_the_last_call():
    assert rewards_of(*CALLS, final=0.0) == [[], [], [("primary", 0.0, True, True)]]


def test_rewards_of_other_attempts_are_left_out():
    lost = make_reward(0, 0.75, ("primary", 9.0)) | {"attempt_id": "at-0-0"}
    assert rewards_of(lost, *CALLS, final=1.0) == [[], [], [("primary", 1.0, True, True)]]


@pytest.mark.parametrize(
    "attributes",
    [
        {semconv.AGENTOPS_TASK_OUTPUT: '{"type": "reward", "value": 1.0}'},
        {"reward": 1.0},
        {semconv.EVALUATION_SCORE: 1.0},
    ],
)
def test_rewards_under_other_names_count_as_well(attributes: dict[str, Any]):
    span = make_reward(0, 3.0, ("primary", 0.0)) | {
        "reward": None,
        "attributes": json.dumps(attributes),
    }
    assert rewards_of(span, *CALLS, final=1.0)[-1] == [("primary", 1.0, True, True)]


@given(st.permutations(range(6)))
def test_the_order_of_the_spans_does_not_matter(order: list[int]):
    spans = (
        *CALLS,
        make_reward(0, 0.75, ("primary", 0.25)),
        make_reward(0, 1.75, ("primary", 0.5)),
        make_reward(0, 3.0, ("primary", 1.0)),
    )
    rewards = rewards_of(*(spans[place] for place in order), final=1.0)
    assert [[value for _, value, *_ in call] for call in rewards] == [[0.25], [0.5], [1.0]]
