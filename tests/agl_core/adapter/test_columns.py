import pyarrow as pa
import pytest

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
