"""Faults of Agent Lightning 0.3 in the data that it trains on, each as the case that shows it.

Its section numbers: 1 and 2 are the merging of turns, 3 and 4 rewards, 5 order, 7 empty batches and
groups that lose members, 8 prompts that are too long, 9 calls without token ids. That validation
samples at its own temperature (6) is tested with the algorithm.
"""

import pytest

from agl_core.adapter.columns import spans_to_triplets
from agl_core.errors import TraceError
from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.settings import BatchSettings
from tests.builders import make_call, make_outcomes, make_requests, make_spans, make_triplets


def batch_rows(calls: list[dict], **overrides: object) -> list[dict]:
    rules = {
        "level": "trajectory",
        "max_prompt_length": 4,
        "max_response_length": 16,
        "min_group_size": 1,
        "temperature": 1.0,
    }
    settings = BatchSettings.model_validate(rules | overrides)
    return build_batch(make_triplets(*calls), settings).rows.to_pylist()


def call(index: int, call_index: int, prompt: list[int], response: list[int], **more: object):
    return {
        "index": index,
        "group": 0,
        "call_index": call_index,
        "prompt_ids": prompt,
        "response_ids": response,
        "logprobs": [-0.5] * len(response),
        **more,
    }


@pytest.mark.parametrize("policy", ["left", "right"])
def test_item_1_a_long_prompt_of_a_later_row_never_gets_into_the_loss(policy: str):
    """The second call starts a row of its own, with a prompt above the limit."""
    calls = [call(0, 0, [1, 2], [3]), call(0, 1, [9, 1, 2, 8, 8, 4], [5])]
    _, row = batch_rows(calls, prompt_truncation=policy)
    assert row["prompt_ids"] == ([1, 2, 8, 8, 4][1:] if policy == "left" else [9, 1, 2, 8])
    assert (row["response_ids"], row["response_mask"]) == ([5], [1])


def test_item_2_a_prompt_that_is_the_context_adds_nothing():
    rows = batch_rows([call(0, 0, [1, 2], [3]), call(0, 1, [1, 2, 3], [4, 5])])
    assert [(row["prompt_ids"], row["response_ids"]) for row in rows] == [([1, 2], [3, 4, 5])]
    assert rows[0]["response_mask"] == [1, 1, 1]


def test_item_2_a_call_that_was_made_twice_is_two_rows():
    rows = batch_rows([call(0, 0, [1, 2], [3, 4])] * 2)
    assert [row["response_ids"] for row in rows] == [[3, 4], [3, 4]]
    assert [row["response_mask"] for row in rows] == [[1, 1], [1, 1]]


@pytest.mark.parametrize("num_calls", [1, 2])
def test_item_3_the_final_reward_is_the_one_that_is_trained_on(num_calls: int):
    """Emitted 0.25, then returned 0.75: the pipeline records the returned one last."""
    rewards = [
        make_call(0, place + 10, name="agentlightning.annotation", reward=value)
        | {"start_time": 10.0 + place, "end_time": 10.0 + place}
        for place, value in enumerate((0.25, 0.75))
    ]
    spans = make_spans(*(make_call(0, place) for place in range(num_calls)), *rewards)
    outcomes = make_outcomes({"index": 0, "reward": 0.75})
    triplets = spans_to_triplets(spans, outcomes, make_requests(1).select(["index", "group"]))
    assert triplets["reward"].to_pylist() == [0.75] * num_calls
    last = triplets["rewards"].to_pylist()[-1]
    assert [(e["value"], e["final"]) for e in last] == [(0.25, False), (0.75, True)]


def test_item_4_rewards_on_the_way_and_their_dimensions_can_be_trained_on():
    entry = {"primary": True, "final": False, "matched": True}
    steps = [
        [{"name": "accuracy", "value": 0.5, **entry}],
        [
            {"name": "accuracy", "value": 1.0, **entry, "final": True},
            {"name": "format", "value": 1.0, **entry, "final": True, "primary": False},
        ],
    ]
    calls = [
        call(0, 0, [1], [2], rewards=steps[0]),
        call(0, 1, [1, 2, 3], [4], rewards=steps[1]),
    ]
    weights = {"accuracy": 1.0, "format": 0.25}
    (row,) = batch_rows(calls, credit="per_call", reward_weights=weights)
    assert row["token_rewards"] == [0.5, 0.0, 1.25]


def test_item_4_a_rollout_has_one_value_however_many_calls_it_made():
    """Its group's statistics would otherwise weigh a rollout by its turns."""
    entry = {"name": "primary", "primary": True, "final": False, "matched": True}
    calls = [
        call(0, place, [place + 1], [9], rewards=[{**entry, "value": 0.25}]) for place in range(4)
    ]
    rows = batch_rows(calls, credit="per_call", level="transition")
    assert [row["rollout_reward"] for row in rows] == [1.0] * 4


def test_item_5_calls_are_in_the_order_in_which_they_were_made():
    """Whatever the tree, the list or the clocks say: the proxy numbered them."""
    spans = make_spans(
        make_call(0, 1, prompt_token_ids=[1, 2, 3, 4], start_time=0.0, end_time=0.1),
        make_call(0, 0, prompt_token_ids=[1, 2], start_time=5.0, end_time=6.0),
    )
    triplets = spans_to_triplets(
        spans, make_outcomes({"index": 0}), make_requests(1).select(["index", "group"])
    )
    assert triplets["call_index"].to_pylist() == [0, 1]
    assert len(batch_rows(triplets.to_pylist())) == 1


def test_item_7_a_failed_rollout_is_no_row_and_its_group_is_what_is_left():
    spans = make_spans(make_call(0), make_call(1))
    outcomes = make_outcomes({"index": 0}, {"index": 1, "kind": "timeout", "reward": None})
    groups = make_requests(2).select(["index", "group"])
    calls = spans_to_triplets(spans, outcomes, groups).to_pylist()
    rows = batch_rows(calls, min_group_size=2)
    assert [(row["index"], row["drop_reason"]) for row in rows] == [(0, "group_too_small")]


def test_item_8_a_long_prompt_keeps_the_end_that_the_user_chose():
    calls = [call(0, 0, [1, 2, 3, 4, 5], [6])]
    assert batch_rows(calls)[0]["drop_reason"] == "prompt_too_long"
    assert batch_rows(calls, prompt_truncation="left")[0]["prompt_ids"] == [2, 3, 4, 5]
    assert batch_rows(calls, prompt_truncation="right")[0]["prompt_ids"] == [1, 2, 3, 4]
    with pytest.raises(TraceError, match="has 5 tokens, above the limit of 4"):
        batch_rows(calls, prompt_truncation="error")


def test_item_9_a_call_without_token_ids_is_an_error_and_no_empty_row():
    spans = make_spans(make_call(0, prompt_token_ids=None, response_token_ids=None, logprobs=None))
    with pytest.raises(TraceError, match="does the model server return token ids"):
        spans_to_triplets(
            spans, make_outcomes({"index": 0}), make_requests(1).select(["index", "group"])
        )
