import numpy as np
import pytest
from hypothesis import given, settings

from agl_core.trajectory import join
from agl_core.trajectory.join import join_calls
from agl_core.trajectory.ragged import Ragged
from tests.agl_core.trajectory.conversations import rollouts

Call = tuple[list[int], list[int]]


def ragged(lists: list[list[int]]) -> Ragged:
    flat = np.array([i for ids in lists for i in ids], dtype=np.int32)
    return Ragged(flat, np.array([len(ids) for ids in lists], dtype=np.int64))


def rows(*calls: Call, rollout: list[int] | None = None) -> list[int]:
    return joined(*calls, rollout=rollout).row.tolist()


def joined(*calls: Call, rollout: list[int] | None = None) -> join.Joins:
    return join_calls(
        ragged([prompt for prompt, _ in calls]),
        ragged([response for _, response in calls]),
        np.array(rollout or [0] * len(calls)),
        np.ones(len(calls), dtype=bool),
    )


def test_a_prompt_that_starts_with_the_context_continues_it():
    found = joined(([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7]))
    assert found.row.tolist() == [0, 0, 0]
    assert found.shared.tolist() == [0, 3, 5]


def test_a_prompt_that_is_the_context_continues_it_with_nothing_observed():
    assert joined(([1], [2, 3]), ([1, 2, 3], [4])).shared.tolist() == [0, 3]


def test_a_response_does_not_help_a_prompt_to_continue():
    """Prompt and response together cover the context, the prompt alone does not."""
    assert rows(([1, 2], [3, 4]), ([1, 2], [3, 4])) == [0, 1]
    assert rows(([1, 2], [3, 4]), ([1, 2, 3], [4, 5])) == [0, 1]


def test_other_ids_for_what_was_sampled_break_the_row():
    assert rows(([1], [2, 3]), ([1, 9, 4], [5])) == [0, 1]


def test_interleaved_agents_keep_their_rows():
    a0, b0 = ([1, 2], [3]), ([7, 8], [9])
    a1, b1 = ([1, 2, 3, 4], [5]), ([7, 8, 9, 4], [6])
    assert rows(a0, b0, b1, a1) == [0, 1, 1, 0]


def test_a_context_is_continued_once_and_the_second_call_is_a_fork():
    found = joined(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6]), ([1, 2, 5, 6], [7]))
    assert found.row.tolist() == [0, 0, 1, 1]
    assert found.forked.tolist() == [False, False, True, False]


def test_the_longest_context_wins():
    assert rows(([1], [2]), ([1, 2, 3], [4]), ([1], [2]), ([1, 2, 3, 4, 5], [6])) == [0, 0, 1, 0]


def test_of_equal_contexts_the_latest_is_continued():
    assert rows(([1], [2]), ([1], [2]), ([1, 2, 3], [4])) == [0, 1, 1]


def test_calls_of_another_rollout_are_never_continued():
    assert rows(([1], [2]), ([1, 2, 3], [4]), rollout=[0, 1]) == [0, 1]


def test_no_calls_make_no_rows():
    assert joined().num_rows == 0


@settings(max_examples=40, deadline=None)
@given(rollouts())
def test_blocks_do_not_change_what_joins(triplets: list[dict]):
    columns = (
        ragged([t["prompt_ids"] for t in triplets]),
        ragged([t["response_ids"] for t in triplets]),
        np.array([t["index"] for t in triplets]),
        np.array([t["temperature"] == 1.0 for t in triplets]),
    )
    whole = join_calls(*columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join, "_BLOCK_TOKENS", 4)
        parts = join_calls(*columns)
        patch.setattr(join, "_FILTER_BITS", 1)
        crowded = join_calls(*columns)
    for other in (parts, crowded):
        assert whole.row.tolist() == other.row.tolist()
        assert whole.shared.tolist() == other.shared.tolist()


def test_a_hash_that_collides_joins_nothing(monkeypatch: pytest.MonkeyPatch):
    """With factors of 0 all prefixes of a rollout have one hash; ids decide."""

    class Zeros:
        def integers(self, *_: object, size: int, dtype: type) -> np.ndarray:
            return np.zeros(size, dtype) - np.ones(size, dtype)  # `| 1` leaves a constant

    monkeypatch.setattr(join.np.random, "default_rng", lambda _: Zeros())
    assert rows(([1, 2], [3]), ([2, 1, 3, 4], [5]), ([1, 2, 3, 4], [5])) == [0, 1, 0]
