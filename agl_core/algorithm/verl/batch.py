"""Batch rows as flat columns, and as VERL's tensors, jagged or padded.

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

with quiet_imports():
    from tensordict import TensorDict
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
    step: np.ndarray
    """[N] place of the row in its rollout, from 0."""
    reward: np.ndarray
    """[N] float64, sum of the row's token rewards."""
    rollout_reward: np.ndarray
    """[N] float64, the rollout's one value; the same on all its rows."""
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
    token_rewards: np.ndarray
    """[R] float32."""
    rollout_logprobs: np.ndarray | None
    """[R] float32, nats; None where the batch has none for some token."""

    def __len__(self) -> int:
        return len(self.row)

    def weighted_tokens(self) -> np.ndarray:
        """Return [N] the number of each row's tokens with loss weight."""
        starts = np.cumsum(self.response_lengths) - self.response_lengths
        return np.add.reduceat(self.response_mask, starts)


def read_rows(table: pa.Table) -> RowBatch:
    """Read a batch table into columns.

    Args:
        table: Schema `BATCH_ROWS`; rows with a drop reason are left out.

    Raises:
        TrainerError: No row is left, a row has no prompt or response token, a row's columns
            differ in length, or a reward is not finite.
    """
    table = table.filter(table["drop_reason"].is_null())
    if len(table) == 0:
        raise TrainerError("the batch has no row; all rollouts failed or were filtered")
    prompt_ids, prompt_lengths = _ragged(table, "prompt_ids")
    response_ids, response_lengths = _ragged(table, "response_ids")
    if prompt_lengths.min() < 1 or response_lengths.min() < 1:
        raise TrainerError("a batch row has no prompt or no response token")
    columns = {}
    for name in ("response_mask", "token_rewards"):
        columns[name], lengths = _ragged(table, name)
        if not np.array_equal(lengths, response_lengths):
            raise TrainerError(f"a batch row has a {name} of another length than its response")
    logprobs, logprob_lengths = _ragged(table, "rollout_logprobs")
    batch = RowBatch(
        row=table["row"].to_numpy(),
        rollout=table["index"].to_numpy(),
        group=table["group"].to_numpy(),
        step=table["step"].to_numpy(),
        reward=table["reward"].to_numpy(),
        rollout_reward=table["rollout_reward"].to_numpy(),
        prompt_ids=_flat(prompt_ids, np.int64),
        prompt_lengths=prompt_lengths,
        response_ids=_flat(response_ids, np.int64),
        response_lengths=response_lengths,
        response_mask=_flat(columns["response_mask"], np.int64),
        token_rewards=_flat(columns["token_rewards"], np.float32),
        rollout_logprobs=None
        if logprobs.null_count or not np.array_equal(logprob_lengths, response_lengths)
        else _flat(logprobs, np.float32),
    )
    for rewards in (batch.reward, batch.rollout_reward, batch.token_rewards):
        if not np.isfinite(rewards).all():
            raise TrainerError("a batch row has a reward that is missing or not finite")
    return batch


def _ragged(table: pa.Table, name: str) -> tuple[pa.Array, np.ndarray]:
    """Return a list column's flat values and each row's length; a null list has length 0."""
    column = table[name].combine_chunks()
    lengths = column.value_lengths().fill_null(0)
    return column.flatten(), lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def _flat(values: pa.Array, dtype: type) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False).astype(dtype)


def jagged(values: np.ndarray | torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Return flat values as the jagged nested tensor [N, ragged] that VERL works on."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return torch.nested.nested_tensor_from_jagged(torch.as_tensor(values), offsets)


class Padding:
    """Converts between flat columns and the padded tensors [N, longest] of VERL's estimators.

    Args:
        lengths: [N] tokens of each row.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self._shape = (len(lengths), int(lengths.max()))
        self._rows = np.repeat(np.arange(len(lengths)), lengths)
        self._columns = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    def pad(self, values: np.ndarray) -> torch.Tensor:
        """Return flat values [R] padded with 0 on the right."""
        padded = np.zeros(self._shape, dtype=values.dtype)
        padded[self._rows, self._columns] = values
        return torch.from_numpy(padded)

    def flatten(self, padded: torch.Tensor) -> np.ndarray:
        """Return a padded tensor's values without the padding, [R] float32."""
        return padded.numpy()[self._rows, self._columns].astype(np.float32)


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
