import numpy as np
import pytest

from agl_core.errors import TraceError
from agl_core.trajectory.batch import Batch, build_batch
from agl_core.trajectory.settings import BatchSettings
from tests.builders import make_triplets


def build(*rows: dict, **overrides: object) -> Batch:
    rules = {"max_prompt_length": 8, "max_response_length": 8, "temperature": 1.0} | overrides
    return build_batch(make_triplets(*rows), BatchSettings.model_validate(rules))


def rows_of(*rows: dict, **overrides: object) -> list[dict]:
    return build(*rows, **overrides).rows.to_pylist()


def reasons(rows: list[dict]) -> list[str | None]:
    return [row["drop_reason"] for row in rows]


def response(ids: list[int]) -> dict:
    return {"response_ids": ids, "logprobs": [-float(i) for i in ids]}


PAIR = ({"index": 0, "group": 0}, {"index": 1, "group": 0, "reward": 0.0})
LONG_PROMPT = {"prompt_ids": list(range(9))}
LONG_RESPONSE = response(list(range(9)))


def test_every_sampled_token_has_loss_weight():
    rows = rows_of({**PAIR[0], **response([5, 6, 7])}, PAIR[1])
    assert rows[0]["response_mask"] == [1, 1, 1]
    assert rows[0]["rollout_logprobs"] == [-5.0, -6.0, -7.0]
    assert rows[0]["policy_versions"] == ["v000000"] * 3
    assert reasons(rows) == [None, None]


def test_a_version_that_was_not_recorded_is_empty_and_the_token_still_counts_as_sampled():
    rows = rows_of({**PAIR[0], "policy_version": None}, PAIR[1])
    assert rows[0]["policy_versions"] == ["", ""]


def test_each_token_has_the_version_that_sampled_it():
    second = {**PAIR[0], "call_index": 1, "prompt_ids": [1, 2, 3, 4, 5], "policy_version": "v2"}
    rows = rows_of(PAIR[0], second, PAIR[1], level="trajectory")
    assert rows[0]["policy_versions"] == ["v000000", "v000000", None, "v2", "v2"]
    assert rows[0]["num_calls"] == 2


def test_long_rows_are_dropped_with_their_reason():
    rows = rows_of(
        {"index": 0, "group": 0, **LONG_PROMPT},
        {"index": 1, "group": 0, **LONG_RESPONSE},
        {"index": 2, "group": 0},
        {"index": 3, "group": 0},
    )
    assert reasons(rows) == ["prompt_too_long", "response_too_long", None, None]


@pytest.mark.parametrize(("policy", "kept"), [("left", [1, 2, 3]), ("right", [0, 1, 2])])
def test_long_prompts_are_cut_at_the_end_that_is_asked_for(policy: str, kept: list[int]):
    long = {**PAIR[0], "prompt_ids": [0, 1, 2, 3]}
    rows = rows_of(long, PAIR[1], max_prompt_length=3, prompt_truncation=policy)
    assert (rows[0]["prompt_ids"], rows[0]["truncated"]) == (kept, f"prompt_{policy}")
    assert (rows[1]["prompt_ids"], rows[1]["truncated"]) == ([1, 2], None)


@pytest.mark.parametrize(("policy", "kept"), [("left", [5, 6, 7]), ("right", [4, 5, 6])])
def test_long_responses_are_cut_with_all_that_belongs_to_their_tokens(policy: str, kept: list[int]):
    long = {**PAIR[0], **response([4, 5, 6, 7])}
    batch = build(long, PAIR[1], max_response_length=3, response_truncation=policy)
    row = batch.rows.to_pylist()[0]
    assert (row["response_ids"], row["truncated"]) == (kept, f"response_{policy}")
    assert row["rollout_logprobs"] == [-float(i) for i in kept]
    assert row["token_rewards"] == [0.0, 0.0, 1.0]
    assert batch.tokens.dropped == {"truncated": 1}
    assert (batch.tokens.sampled, batch.tokens.trained) == (6, 5)


def test_both_cuts_are_noted():
    cut = {"prompt_truncation": "left", "response_truncation": "right"}
    rows = rows_of({**PAIR[0], **LONG_PROMPT, **LONG_RESPONSE}, PAIR[1], **cut)
    assert rows[0]["truncated"] == "prompt_left,response_right"


@pytest.mark.parametrize(
    ("part", "long", "call"), [("prompt", LONG_PROMPT, 0), ("response", LONG_RESPONSE, 4)]
)
def test_a_long_row_is_an_error_that_names_it_where_that_is_asked_for(part, long, call):
    with pytest.raises(TraceError) as caught:
        build({**PAIR[0], **long, "call_index": call}, PAIR[1], **{f"{part}_truncation": "error"})
    assert str(caught.value) == (
        f"rollout ro-0: the {part} of its row from call {call} on has 9 tokens, above the limit of "
        "8; raise the limit, or choose another truncation than 'error'"
    )


def test_a_row_that_is_dropped_anyway_is_no_error():
    odd = {**PAIR[0], **LONG_PROMPT, "temperature": 0.5}
    assert reasons(rows_of(odd, PAIR[1], prompt_truncation="error", min_group_size=1)) == [
        "other_temperature",
        None,
    ]


@pytest.mark.parametrize(
    ("policy", "masks", "dropped"),
    [
        ("keep", [[1, 1], [1, 1]], [None, None]),
        ("mask", [[0, 0], [1, 1]], [None, None]),
        ("drop", [[1, 1], [1, 1]], ["unfinished", "group_too_small"]),
    ],
)
def test_unfinished_rows_are_kept_masked_or_dropped(policy: str, masks: list, dropped: list):
    batch = build({**PAIR[0], "finish_reason": "length"}, PAIR[1], unfinished=policy)
    rows = batch.rows.to_pylist()
    assert [row["response_mask"] for row in rows] == masks
    assert reasons(rows) == dropped
    assert batch.tokens.masked == (2 if policy == "mask" else 0)


def test_only_the_last_response_of_a_trajectory_can_be_unfinished():
    second = {**PAIR[0], "call_index": 1, "prompt_ids": [1, 2, 3, 4]}
    rules = {"level": "trajectory", "unfinished": "drop", "min_group_size": 1}
    assert reasons(rows_of({**PAIR[0], "finish_reason": "length"}, second, **rules)) == [None]
    assert reasons(rows_of(PAIR[0], {**second, "finish_reason": "length"}, **rules)) == [
        "unfinished"
    ]


def test_a_group_of_one_is_dropped_whole():
    rows = rows_of(
        {"index": 0, "group": 0},
        {"index": 0, "group": 0, "call_index": 1},
        {"index": 2, "group": 1},
        {"index": 3, "group": 1},
    )
    assert reasons(rows) == ["group_too_small", "group_too_small", None, None]


def test_a_group_shrinks_by_its_long_rows():
    rows = rows_of({**PAIR[0], **LONG_PROMPT}, PAIR[1])
    assert reasons(rows) == ["prompt_too_long", "group_too_small"]


def test_groups_with_one_reward_are_dropped_where_that_is_asked_for():
    calls = (*PAIR, {"index": 2, "group": 1}, {"index": 3, "group": 1})
    assert reasons(rows_of(*calls)) == [None] * 4
    assert reasons(rows_of(*calls, drop_equal_rewards=True)) == [
        *(None, None),
        *("equal_rewards", "equal_rewards"),
    ]


def test_rewards_that_differ_by_rounding_count_as_equal():
    calls = [{"index": 0, "group": 0, "reward": 0.1 + 0.2}, {"index": 1, "group": 0, "reward": 0.3}]
    assert reasons(rows_of(*calls, drop_equal_rewards=True)) == ["equal_rewards"] * 2
    calls[1]["reward"] = 0.3001
    assert reasons(rows_of(*calls, drop_equal_rewards=True)) == [None, None]


def test_a_rollout_alone_has_nothing_to_be_equal_to():
    assert reasons(rows_of(PAIR[0], drop_equal_rewards=True, min_group_size=1)) == [None]


def test_calls_at_another_temperature_are_dropped():
    rows = rows_of(
        {"index": 0, "group": 0, "temperature": 0.0},
        {"index": 0, "group": 0, "call_index": 1, "temperature": None},  # a server's default is 1
        {"index": 1, "group": 0, "temperature": 1.0},
    )
    assert reasons(rows) == ["other_temperature", None, None]


def test_calls_sampled_from_another_distribution_are_dropped_unless_the_run_allows_it():
    calls = (
        {**PAIR[0], "sampling": '{"top_p": 0.9}'},
        {**PAIR[1], "sampling": '{"top_p": 0.9, "stop": ["x"]}'},
        {**PAIR[0], "index": 2, "sampling": "{}"},
        {**PAIR[0], "index": 3, "sampling": None},  # recorded by an older version
    )
    other = "other_sampling"
    assert reasons(rows_of(*calls)) == [other, other, None, None]
    assert reasons(rows_of(*calls, sampling={"top_p": 0.9})) == [None, other, other, None]
    assert reasons(rows_of(*calls, allowed_sampling=["top_p"])) == [None, other, None, None]
    assert reasons(rows_of(*calls, allowed_sampling=["top_p", "stop"])) == [None] * 4


def test_an_unbroken_rollout_is_one_row_with_every_token_once():
    prompts = [list(range(20 + 15 * turn)) for turn in range(8)]
    calls = [
        {
            **PAIR[0],
            "call_index": turn,
            "prompt_ids": prompt,
            **response(list(range(len(prompt), len(prompt) + 10))),
        }
        for turn, prompt in enumerate(prompts)
    ]
    limits = {"max_prompt_length": 999, "max_response_length": 999, "min_group_size": 1}
    (row,) = rows_of(*calls, level="trajectory", **limits)
    assert row["prompt_ids"] + row["response_ids"] == list(range(20 + 7 * 15 + 10))
    assert sum(row["response_mask"]) == 8 * 10
    each = rows_of(*calls, **limits)
    assert sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in each) == 8 * 30 + 28 * 15


def test_a_call_at_another_temperature_is_an_observation_of_the_calls_around_it():
    calls = (
        PAIR[0],
        {**PAIR[0], "call_index": 1, "prompt_ids": [1, 2, 3, 4, 5], "temperature": 0.0},
        {**PAIR[0], "call_index": 2, "prompt_ids": [1, 2, 3, 4, 5, 3, 4, 6]},
    )
    rows = rows_of(*calls, level="trajectory", min_group_size=1)
    assert reasons(rows) == [None, "other_temperature"]
    assert rows[0]["response_ids"] == [3, 4, 5, 3, 4, 6, 3, 4]
    assert rows[0]["response_mask"] == [1, 1, 0, 0, 0, 0, 1, 1]


def test_rows_of_a_rollout_are_numbered():
    calls = (PAIR[0], {**PAIR[0], "call_index": 1}, PAIR[1])
    rows = rows_of(*calls)
    assert [(row["row"], row["step"]) for row in rows] == [(0, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("level", ["transition", "trajectory"])
def test_no_triplets_give_no_rows(level: str):
    batch = build(level=level)
    assert (len(batch.rows), len(batch.breaks), batch.tokens.sampled) == (0, 0, 0)


def test_a_slice_of_triplets_gives_the_rows_of_its_calls():
    """Offsets of a sliced list column do not start at 0."""
    calls = [{"index": i, "group": 0, **response([i + 1] * (i + 1))} for i in range(4)]
    rules = BatchSettings(max_prompt_length=8, max_response_length=8, temperature=1.0)
    rows = build_batch(make_triplets(*calls).slice(2), rules).rows.to_pylist()
    assert [row["response_ids"] for row in rows] == [[3, 3, 3], [4, 4, 4, 4]]


def test_settings_that_would_do_nothing_are_refused():
    limits = {"max_prompt_length": 8, "max_response_length": 8, "temperature": 1.0}
    with pytest.raises(ValueError, match=r"discount=0\.5 needs credit 'discounted'"):
        BatchSettings.model_validate({**limits, "discount": 0.5})
    with pytest.raises(ValueError, match="no weight other than 0"):
        BatchSettings.model_validate({**limits, "reward_weights": {"accuracy": 0.0}})
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        BatchSettings.model_validate({**limits, "levels": "trajectory"})


def test_the_sum_of_rewards_is_not_rounded_to_single_precision():
    third = 1 / 3
    rows = rows_of({**PAIR[0], "reward": third}, PAIR[1])
    assert rows[0]["reward"] == third
    assert rows[0]["token_rewards"][-1] == float(np.float32(third))
