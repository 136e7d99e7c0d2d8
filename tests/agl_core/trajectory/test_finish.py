"""When a response counts as cut off."""

from typing import Any

import pyarrow as pa
import pytest

from agl_core.ledger.tables import TRIPLETS
from agl_core.trajectory.finish import find_cut_short
from agl_core.trajectory.ragged import Ragged

END = 9


def is_cut(
    ids: list[int], limit: int | None, reason: str | None, sampling: str | None, ends: set[int]
) -> bool:
    row: dict[str, Any] = {
        "response_ids": ids,
        "max_tokens": limit,
        "finish_reason": reason,
        "sampling": sampling,
    }
    triplets = pa.Table.from_pylist([row], schema=TRIPLETS)
    responses = Ragged.from_column(triplets["response_ids"])
    return bool(find_cut_short(triplets, responses, frozenset(ends))[0])


@pytest.mark.parametrize("reason", ["length", "tool_calls", "stop", "abort", None])
def test_a_response_with_all_tokens_of_its_limit_is_cut_whatever_the_server_says(
    reason: str | None,
):
    assert is_cut([1, 2, 3, 4], 4, reason, "{}", set())
    assert is_cut([1, 2, 3, 4], 4, reason, "{}", {END})


@pytest.mark.parametrize("reason", ["length", "tool_calls", "stop", None])
def test_a_response_that_the_policy_ended_is_whole_even_at_its_limit(reason: str | None):
    assert not is_cut([1, 2, 3, END], 4, reason, "{}", {END})


def test_an_aborted_response_is_cut_though_it_is_short():
    assert is_cut([1, 2], 4, "abort", "{}", set())


def test_a_short_response_without_an_end_was_ended_by_the_context_or_by_a_stop_text():
    assert is_cut([1, 2], 4, "tool_calls", "{}", {END})
    assert not is_cut([1, 2], 4, "stop", '{"stop": ["x"]}', {END})
    assert not is_cut([1, 2], 4, "stop", '{"stop_token_ids": [2]}', {END})


def test_without_a_limit_or_known_ends_only_the_server_can_say():
    assert is_cut([1, 2], None, "length", None, set())
    assert not is_cut([1, 2], None, "stop", None, set())
    assert not is_cut([1, 2], None, "stop", None, {END}), "sampling was not recorded"
