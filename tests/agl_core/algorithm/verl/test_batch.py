"""Rows as VERL's tensors."""

import math

import numpy as np
import pyarrow as pa
import pytest

from agl_core.algorithm.verl.batch import Padding, read_rows, to_tensordict
from agl_core.errors import TrainerError
from agl_core.ledger.tables import BATCH_ROWS
from tests.agl_core.algorithm.verl.conftest import UNEVEN, make_rows


def test_tensors_hold_the_rows_token_by_token():
    table = make_rows(UNEVEN)
    batch = read_rows(table)
    values = np.arange(len(batch.response_ids), dtype=np.float32)
    data = to_tensordict(batch, old_log_probs=values)
    rows = table.to_pylist()
    assert data.batch_size[0] == len(rows)
    for k, row in enumerate(rows):
        ids = row["prompt_ids"] + row["response_ids"]
        assert data["input_ids"][k].tolist() == ids
        assert data["position_ids"][k].tolist() == list(range(len(ids)))
        assert data["prompts"][k].tolist() == row["prompt_ids"]
        assert data["responses"][k].tolist() == row["response_ids"]
        assert data["response_mask"][k].tolist() == row["response_mask"]
        assert len(data["old_log_probs"][k]) == len(row["response_ids"])
    assert data["old_log_probs"].values().tolist() == values.tolist()


def test_rows_of_several_chunks_and_slices_are_read():
    table = make_rows(UNEVEN)
    pieces = pa.concat_tables([table.slice(2, 3), table.slice(0, 2)])
    batch = read_rows(pieces)
    assert batch.row.tolist() == [102, 103, 104, 100, 101]
    assert batch.response_ids.tolist() == [
        token for ids in pieces["response_ids"].to_pylist() for token in ids
    ]


def test_rows_with_a_drop_reason_are_left_out():
    rows = make_rows(UNEVEN).to_pylist()
    rows[1]["drop_reason"] = "too_long"
    batch = read_rows(pa.Table.from_pylist(rows, schema=BATCH_ROWS))
    assert 101 not in batch.row.tolist()
    assert len(batch) == len(UNEVEN) - 1


def test_missing_rollout_logprobs_are_none():
    assert read_rows(make_rows(UNEVEN, logprob=None)).rollout_logprobs is None


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("prompt_ids", [], "no prompt"),
        ("response_ids", [], "no response"),
        ("response_mask", [1], "response_mask of another length"),
        ("token_rewards", [1.0], "token_rewards of another length"),
        ("rollout_reward", math.inf, "not finite"),
        ("reward", math.nan, "not finite"),
        ("reward", None, "missing"),
    ],
)
def test_a_broken_row_is_refused(column: str, value: object, message: str):
    rows = make_rows(UNEVEN).to_pylist()
    rows[1][column] = value
    with pytest.raises(TrainerError, match=message):
        read_rows(pa.Table.from_pylist(rows, schema=BATCH_ROWS))


def test_a_batch_without_rows_is_refused():
    with pytest.raises(TrainerError, match="no row"):
        read_rows(make_rows(UNEVEN).slice(0, 0))


def test_padding_and_back_keeps_every_value():
    lengths = np.array([2, 5, 1])
    values = np.arange(1, 9, dtype=np.float32)
    padding = Padding(lengths)
    padded = padding.pad(values)
    assert padded.tolist() == [[1, 2, 0, 0, 0], [3, 4, 5, 6, 7], [8, 0, 0, 0, 0]]
    assert padding.flatten(padded * 2).tolist() == (values * 2).tolist()
