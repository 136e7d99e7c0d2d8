import numpy as np
import pyarrow as pa
import pytest

from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.tokens import count_lost_tokens, count_tokens, recount_tokens
from tests.builders import make_triplets


def rows(*masks: list[int], versions: list[str | None], **columns: str | None) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "row": row,
                "response_ids": [7] * len(mask),
                "response_mask": mask,
                "policy_versions": versions,
                **columns,
            }
            for row, mask in enumerate(masks)
        ],
        schema=BATCH_ROWS,
    )


def test_a_token_that_is_in_no_row_is_an_error():
    table = rows([1, 0], versions=["v1", None])
    assert count_tokens(1, np.array([1]), table).trained == 1
    with pytest.raises(ValueError, match="1 of 2 sampled tokens are in no row"):
        count_tokens(2, np.array([1]), table)
    with pytest.raises(ValueError, match="1 of 2 sampled tokens are in no row"):
        count_tokens(2, np.array([2]), table)


def test_what_was_cut_off_is_accounted_for():
    table = rows([1, 0], versions=["v1", None], truncated="response_right")
    assert count_tokens(3, np.array([3]), table).dropped == {"truncated": 2}


def test_weight_on_a_token_that_was_not_sampled_is_an_error():
    with pytest.raises(ValueError, match="not sampled has loss weight"):
        count_tokens(1, np.array([1]), rows([1, 1], versions=["v1", None]))


def test_tokens_of_further_choices_are_accounted_for():
    triplets = make_triplets(
        {"index": 0, "group": 0, "output_tokens": 7},  # two choices, the first one has two tokens
        {"index": 1, "group": 0, "output_tokens": 2},
        {"index": 2, "group": 0, "response_ids": None, "logprobs": None, "output_tokens": 3},
        {"index": 3, "group": 0},  # by a server that counts nothing
    )
    lost = count_lost_tokens(triplets)
    assert lost == {"no_token_ids": 3, "other_choices": 5}
    table = rows([1, 1], [1, 1], [1, 1], versions=["v1", "v1"])
    coverage = count_tokens(6, np.array([2, 2, 2]), table, lost)
    assert (coverage.sampled, coverage.trained, coverage.dropped) == (14, 6, lost)
    assert recount_tokens(triplets, table) == coverage
