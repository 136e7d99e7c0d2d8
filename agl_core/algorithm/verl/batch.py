"""Batch rows as flat columns, as VERL's tensors, and their advantages by VERL's estimators.

A ragged column is one flat array over all rows with the length of each row beside it; two rows of
2 and 3 response tokens are `values=[a, b, c, d, e]`, `lengths=[2, 3]`. Nothing here loops over
tokens. N is the number of rows, R the number of response tokens of all rows, P that of prompt
tokens.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.errors import TrainerError
from agl_core.ledger.tables import UPDATE_ROWS

with quiet_imports():
    from tensordict import TensorDict
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.utils import tensordict_utils


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows that reach the loss; see the module's description for N, R and P."""

    row: np.ndarray
    """[N] number of the row in the batch table."""
    rollout: np.ndarray
    """[N] index of the rollout that the row belongs to."""
    group: np.ndarray
    """[N] group of that rollout."""
    reward: np.ndarray
    """[N] reward of the row, float64; the first row of a rollout carries the rollout's."""
    prompt_ids: np.ndarray
    """[P] int64."""
    prompt_lengths: np.ndarray
    """[N] at least 1."""
    response_ids: np.ndarray
    """[R] int64."""
    response_lengths: np.ndarray
    """[N] at least 1."""
    response_mask: np.ndarray
    """[R] int64, 1 where the token has loss weight."""
    rollout_logprobs: np.ndarray | None
    """[R] float32, nats; None where the batch has none for some token."""

    def __len__(self) -> int:
        return len(self.row)


def read_rows(table: pa.Table) -> RowBatch:
    """Read a batch table into columns.

    Args:
        table: Schema `BATCH_ROWS`; rows with a drop reason are left out.

    Raises:
        TrainerError: No row is left, a row has no prompt or response token, a row's columns
            differ in length, or a reward is not finite.
    """
    table = table.filter(table["drop_reason"].is_null())
    prompt_ids, prompt_lengths = _ragged(table, "prompt_ids")
    response_ids, response_lengths = _ragged(table, "response_ids")
    mask, mask_lengths = _ragged(table, "response_mask")
    logprobs, logprob_lengths = _ragged(table, "rollout_logprobs")
    batch = RowBatch(
        row=table["row"].to_numpy(),
        rollout=table["index"].to_numpy(),
        group=table["group"].to_numpy(),
        reward=table["reward"].to_numpy(),
        prompt_ids=prompt_ids.to_numpy(zero_copy_only=False).astype(np.int64),
        prompt_lengths=prompt_lengths,
        response_ids=response_ids.to_numpy(zero_copy_only=False).astype(np.int64),
        response_lengths=response_lengths,
        response_mask=mask.to_numpy(zero_copy_only=False).astype(np.int64),
        rollout_logprobs=None
        if logprobs.null_count or not np.array_equal(logprob_lengths, response_lengths)
        else logprobs.to_numpy(zero_copy_only=False).astype(np.float32),
    )
    if len(batch) == 0:
        raise TrainerError("the batch has no row; all rollouts failed or were filtered")
    if prompt_lengths.min() < 1 or response_lengths.min() < 1:
        raise TrainerError("a batch row has no prompt or no response token")
    if not np.array_equal(mask_lengths, response_lengths):
        raise TrainerError("a batch row has a response_mask of another length than its response")
    if not np.isfinite(batch.reward).all():
        raise TrainerError("a batch row has a reward that is missing or not finite")
    return batch


def _ragged(table: pa.Table, name: str) -> tuple[pa.Array, np.ndarray]:
    """Return a list column's flat values and each row's length; a null list has length 0."""
    column = table[name].combine_chunks()
    lengths = column.value_lengths().fill_null(0)
    return column.flatten(), lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def jagged(values: np.ndarray | torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Return flat values as the jagged nested tensor [N, ragged] that VERL works on."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return torch.nested.nested_tensor_from_jagged(torch.as_tensor(values), offsets)


def to_tensordict(batch: RowBatch, **token_columns: np.ndarray) -> TensorDict:
    """Return the rows in VERL's no-padding layout.

    Args:
        batch: The rows.
        token_columns: More columns over response tokens, each [R] float32.
    """
    lengths = batch.prompt_lengths + batch.response_lengths
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = np.arange(lengths.sum()) - starts
    is_response = positions >= np.repeat(batch.prompt_lengths, lengths)
    input_ids = np.empty(lengths.sum(), dtype=np.int64)
    input_ids[is_response] = batch.response_ids
    input_ids[~is_response] = batch.prompt_ids
    mask = jagged(batch.response_mask, batch.response_lengths)
    return tensordict_utils.get_tensordict(
        {
            "input_ids": jagged(input_ids, lengths),
            "position_ids": jagged(positions, lengths),
            "prompts": jagged(batch.prompt_ids, batch.prompt_lengths),
            "responses": jagged(batch.response_ids, batch.response_lengths),
            "response_mask": mask,
            "loss_mask": mask,
            **{name: jagged(v, batch.response_lengths) for name, v in token_columns.items()},
        }
    )


def advantages(batch: RowBatch, estimator: str, norm_adv_by_std_in_grpo: bool) -> np.ndarray:
    """Return the advantage of each response token, by VERL's estimator.

    A rollout may have several rows, so group statistics are taken over one value for each
    rollout: VERL's estimator is given one token for each, with the reward of the rollout's first
    row. Its result is spread over all rows and tokens of the rollout; it is 0 where the token has
    no loss weight.

    Args:
        batch: The rows.
        estimator: VERL's name of an estimator with one value for each rollout, such as `grpo`.
        norm_adv_by_std_in_grpo: Divide by the group's standard deviation; False is Dr. GRPO.

    Returns:
        [R] float32.

    Raises:
        TrainerError: A group has one rollout; VERL would take its raw reward as its advantage.
    """
    _, first, inverse = np.unique(batch.rollout, return_index=True, return_inverse=True)
    group = batch.group[first]
    names, sizes = np.unique(group, return_counts=True)
    if (sizes < 2).any():
        raise TrainerError(f"group {names[sizes < 2][0]} has one rollout, too few to compare")
    rewards = torch.from_numpy(batch.reward[first].astype(np.float32)).unsqueeze(1)
    per_rollout, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=group,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
    )
    per_row = per_rollout.squeeze(1).numpy()[inverse]
    per_token = np.repeat(per_row, batch.response_lengths)
    return np.where(batch.response_mask > 0, per_token, 0).astype(np.float32)


def update_rows(batch: RowBatch, old_log_probs: np.ndarray, advantages: np.ndarray) -> pa.Table:
    """Return what an update saw of each row, as `UPDATE_ROWS`.

    Args:
        batch: The rows.
        old_log_probs: [R] float32, nats.
        advantages: [R] float32.
    """
    offsets = np.concatenate([[0], np.cumsum(batch.response_lengths)]).astype(np.int32)
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32()))
        for values in (old_log_probs, advantages)
    ]
    return pa.table([pa.array(batch.row, pa.int32()), *columns], schema=UPDATE_ROWS)
