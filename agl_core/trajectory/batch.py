"""Triplets to batch rows, each either for the loss or with the reason why not.

Aggregation is per call (`transition`): every model call is a row of its own, with its rollout's
final reward. All response tokens were sampled, so all have loss weight; prompt tokens have none.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.outcome import DropReason


def build_rows(triplets: pa.Table, settings: BatchSettings) -> pa.Table:
    """Return one batch row for each triplet, with the reason where it does not reach the loss.

    A row is dropped where its prompt or its response is too long, or where the agent sampled it at
    another temperature; then every row of a group in
    which fewer than `min_group_size` rollouts are left with a row.

    Args:
        triplets: Schema `TRIPLETS`.
        settings: The rules.

    Returns:
        Schema `BATCH_ROWS`, in the order of the triplets, `row` numbered from 0. For every row
        `len(response_ids) == len(response_mask) == len(rollout_logprobs)`.
    """
    num_rows = len(triplets)
    reasons = np.full(num_rows, None, dtype=object)
    prompt_lengths = _lengths(triplets["prompt_ids"])
    response_lengths = _lengths(triplets["response_ids"])
    sampled_at = pc.fill_null(triplets["temperature"], 1.0).to_numpy()
    reasons[sampled_at != settings.temperature] = DropReason.OTHER_TEMPERATURE.value
    reasons[response_lengths > settings.max_response_length] = DropReason.RESPONSE_TOO_LONG.value
    reasons[prompt_lengths > settings.max_prompt_length] = DropReason.PROMPT_TOO_LONG.value

    kept = reasons == None  # noqa: E711 (an object array is compared by element)
    groups = triplets["group"].to_numpy()
    pairs = np.unique(np.stack([groups[kept], triplets["index"].to_numpy()[kept]], axis=1), axis=0)
    sizes = dict(zip(*np.unique(pairs[:, 0], return_counts=True), strict=True))
    small = np.array(
        [sizes.get(group, 0) < settings.min_group_size for group in groups], dtype=bool
    )
    reasons[kept & small] = DropReason.GROUP_TOO_SMALL.value

    indices = triplets["index"].to_numpy()
    steps = np.arange(num_rows) - np.searchsorted(indices, indices)
    ends = np.cumsum(response_lengths)
    token_rewards = np.zeros(ends[-1] if num_rows else 0, dtype=np.float32)
    token_rewards[ends - 1] = triplets["reward"].to_numpy()
    versions = triplets["policy_version"].combine_chunks().dictionary_encode()
    by_token = pa.DictionaryArray.from_arrays(
        versions.indices.take(pa.array(np.repeat(np.arange(num_rows), response_lengths))),
        versions.dictionary,
    )
    return pa.table(
        {
            "row": pa.array(np.arange(num_rows, dtype=np.int32)),
            "index": triplets["index"],
            "rollout_id": triplets["rollout_id"],
            "group": triplets["group"],
            "call_index": triplets["call_index"],
            "step": pa.array(steps, pa.int32()),
            "num_calls": pa.array(np.ones(num_rows), pa.int32()),
            "prompt_ids": triplets["prompt_ids"],
            "response_ids": triplets["response_ids"],
            "response_mask": _lists(np.ones(len(token_rewards), np.int8), response_lengths),
            "rollout_logprobs": triplets["logprobs"],
            "policy_versions": _lists(by_token, response_lengths),
            "token_rewards": _lists(token_rewards, response_lengths),
            "reward": triplets["reward"],
            "rollout_reward": triplets["reward"],
            "truncated": pa.nulls(num_rows, pa.string()),
            "drop_reason": pa.array(reasons, pa.string()),
        },
        schema=BATCH_ROWS,
    )


def _lengths(lists: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy()


def _lists(values: np.ndarray | pa.Array, lengths: np.ndarray) -> pa.Array:
    """Return flat values as lists of these lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
