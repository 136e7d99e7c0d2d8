from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agl_core.trajectory.batch import build_rows
from agl_core.trajectory.settings import BatchSettings
from tests.builders import make_triplets


def build(
    *rows: dict, max_prompt: int = 8, max_response: int = 8, min_group: int = 2
) -> list[dict]:
    settings = BatchSettings(
        max_prompt_length=max_prompt,
        max_response_length=max_response,
        temperature=1.0,
        min_group_size=min_group,
    )
    table = build_rows(make_triplets(*rows), settings)
    return table.to_pylist()


def reasons(rows: list[dict]) -> list[str | None]:
    return [row["drop_reason"] for row in rows]


def test_every_sampled_token_has_loss_weight():
    rows = build({"index": 0, "group": 0, "response_ids": [5, 6, 7], "logprobs": [-1, -2, -3]},
                 {"index": 1, "group": 0})  # fmt: skip
    assert rows[0]["response_mask"] == [1, 1, 1]
    assert rows[0]["rollout_logprobs"] == [-1.0, -2.0, -3.0]
    assert reasons(rows) == [None, None]


def test_long_rows_are_dropped_with_their_reason():
    rows = build(
        {"index": 0, "group": 0, "prompt_ids": list(range(9))},
        {"index": 1, "group": 0, "response_ids": list(range(9)), "logprobs": [0.0] * 9},
        {"index": 2, "group": 0},
        {"index": 3, "group": 0},
    )
    assert reasons(rows) == ["prompt_too_long", "response_too_long", None, None]


def test_a_group_of_one_is_dropped_whole():
    rows = build(
        {"index": 0, "group": 0},
        {"index": 0, "group": 0, "call_index": 1},
        {"index": 2, "group": 1},
        {"index": 3, "group": 1},
    )
    assert reasons(rows) == ["group_too_small", "group_too_small", None, None]


def test_a_group_shrinks_by_its_long_rows():
    rows = build({"index": 0, "group": 0, "prompt_ids": list(range(9))}, {"index": 1, "group": 0})
    assert reasons(rows) == ["prompt_too_long", "group_too_small"]


def test_calls_at_another_temperature_are_dropped():
    rows = build(
        {"index": 0, "group": 0, "temperature": 0.0},
        {"index": 0, "group": 0, "call_index": 1, "temperature": None},  # a server's default is 1
        {"index": 1, "group": 0, "temperature": 1.0},
    )
    assert reasons(rows) == ["other_temperature", None, None]


def test_no_triplets_give_no_rows():
    assert build() == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 12), st.integers(1, 12)),
        max_size=30,
    )
)
def test_rows_agree_with_a_plain_loop(drawn):
    rows = [
        {
            "index": group * 4 + member,
            "group": group,
            "prompt_ids": [1] * prompt,
            "response_ids": [2] * response,
            "logprobs": [0.0] * response,
        }
        for group, member, prompt, response in drawn
    ]
    expected: list[str | None] = []
    for row in rows:
        if len(row["prompt_ids"]) > 8:
            expected.append("prompt_too_long")
        elif len(row["response_ids"]) > 8:
            expected.append("response_too_long")
        else:
            expected.append(None)
    members = Counter(
        group
        for group, _ in {
            (row["group"], row["index"])
            for row, reason in zip(rows, expected, strict=True)
            if reason is None
        }
    )
    for position, row in enumerate(rows):
        if expected[position] is None and members[row["group"]] < 2:
            expected[position] = "group_too_small"
    built = build(*rows)
    assert reasons(built) == expected
    assert [row["row"] for row in built] == list(range(len(rows)))
    for row in built:
        assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["rollout_logprobs"])
