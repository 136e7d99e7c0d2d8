import numpy as np
import pyarrow as pa
import pytest

from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.tokens import count_tokens


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
