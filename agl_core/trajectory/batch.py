"""Triplets to batch rows, each either for the loss or with the reason why not.

Aggregation is per call (`transition`): every model call is a row of its own, with its rollout's
final reward. All response tokens were sampled, so all have loss weight; prompt tokens have none.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.tables import BATCH_ROWS
from agl_core.types.outcome import DropReason


def build_rows(
    triplets: pa.Table,
    *,
    max_prompt_length: int,
    max_response_length: int,
    temperature: float,
    min_group_size: int,
) -> pa.Table:
    """Return one batch row for each triplet, with the reason where it does not reach the loss.

    A row is dropped where its prompt or its response is too long, or where the agent sampled it at
    another temperature; then every row of a group in
    which fewer than `min_group_size` rollouts are left with a row.

    Args:
        triplets: Schema `TRIPLETS`.
        max_prompt_length: Tokens.
        max_response_length: Tokens.
        temperature: Of the run; a call without one was sampled at 1.
        min_group_size: Rollouts.

    Returns:
        Schema `BATCH_ROWS`, in the order of the triplets, `row` numbered from 0. For every row
        `len(response_ids) == len(response_mask) == len(rollout_logprobs)`.
    """
    num_rows = len(triplets)
    reasons = np.full(num_rows, None, dtype=object)
    prompt_lengths = _lengths(triplets["prompt_ids"])
    response_lengths = _lengths(triplets["response_ids"])
    sampled_at = pc.fill_null(triplets["temperature"], 1.0).to_numpy()
    reasons[sampled_at != temperature] = DropReason.OTHER_TEMPERATURE.value
    reasons[response_lengths > max_response_length] = DropReason.RESPONSE_TOO_LONG.value
    reasons[prompt_lengths > max_prompt_length] = DropReason.PROMPT_TOO_LONG.value

    kept = reasons == None  # noqa: E711 (an object array is compared by element)
    groups = triplets["group"].to_numpy()
    pairs = np.unique(np.stack([groups[kept], triplets["index"].to_numpy()[kept]], axis=1), axis=0)
    sizes = dict(zip(*np.unique(pairs[:, 0], return_counts=True), strict=True))
    small = np.array([sizes.get(group, 0) < min_group_size for group in groups], dtype=bool)
    reasons[kept & small] = DropReason.GROUP_TOO_SMALL.value

    return pa.table(
        {
            "row": pa.array(np.arange(num_rows, dtype=np.int32)),
            "index": triplets["index"],
            "rollout_id": triplets["rollout_id"],
            "group": triplets["group"],
            "call_index": triplets["call_index"],
            "prompt_ids": triplets["prompt_ids"],
            "response_ids": triplets["response_ids"],
            "response_mask": _ones_like(triplets["response_ids"]),
            "rollout_logprobs": triplets["logprobs"],
            "reward": triplets["reward"],
            "drop_reason": pa.array(reasons, pa.string()),
        },
        schema=BATCH_ROWS,
    )


def _lengths(lists: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy()


def _ones_like(lists: pa.ChunkedArray) -> pa.Array:
    """Return lists of ones with the same lengths."""
    lengths = _lengths(lists)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ones = pa.array(np.ones(int(offsets[-1]), dtype=np.int8))
    return pa.ListArray.from_arrays(pa.array(offsets), ones)
