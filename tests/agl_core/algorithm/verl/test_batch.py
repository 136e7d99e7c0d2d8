"""Rows as VERL's tensors, and advantages against a plain GRPO."""

import math
import statistics

import numpy as np
import pyarrow as pa
import pytest

from agl_core.algorithm.verl.batch import advantages, read_rows, to_tensordict, update_rows
from agl_core.errors import TrainerError
from agl_core.ledger.tables import BATCH_ROWS, UPDATE_ROWS
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
        ("response_mask", [1], "another length"),
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


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_advantages_equal_a_plain_grpo_over_rollouts(norm_by_std: bool):
    table = make_rows(UNEVEN)
    values = advantages(read_rows(table), "grpo", norm_by_std)
    rewards = {index: (group, reward) for index, group, reward in UNEVEN}
    expected = []
    for row in table.to_pylist():
        group, reward = rewards[row["index"]]
        peers = [r for g, r in rewards.values() if g == group]
        advantage = reward - statistics.mean(peers)
        if norm_by_std:
            advantage /= statistics.stdev(peers) + 1e-6
        expected += [advantage * weight for weight in row["response_mask"]]
    assert values.dtype == np.float32
    assert values.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_order_of_rows_does_not_matter_to_advantages():
    table = make_rows(UNEVEN)
    order = [6, 2, 4, 0, 5, 3, 1]
    shuffled = advantages(read_rows(table.take(order)), "grpo", True)
    straight = update_rows(
        read_rows(table), shuffled * 0, advantages(read_rows(table), "grpo", True)
    )
    expected = [a for k in order for a in straight["advantages"][k].as_py()]
    assert shuffled.tolist() == expected


def test_a_group_of_one_is_refused():
    with pytest.raises(TrainerError, match="group 1 has one rollout"):
        advantages(read_rows(make_rows([*UNEVEN[:3], (2, 1, 1.0), (2, 1, 1.0)])), "grpo", True)


def test_update_rows_keep_the_rows_numbers_and_lengths():
    table = make_rows(UNEVEN)
    batch = read_rows(table)
    values = np.arange(len(batch.response_ids), dtype=np.float32)
    kept = update_rows(batch, values, -values)
    assert kept.schema.equals(UPDATE_ROWS, check_metadata=True)
    assert kept["row"].to_pylist() == table["row"].to_pylist()
    assert [len(v) for v in kept["old_log_probs"].to_pylist()] == batch.response_lengths.tolist()
    assert kept["advantages"].combine_chunks().flatten().to_numpy().tolist() == (-values).tolist()
