"""What became of the tokens that the policy sampled."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.tables import TRIPLETS, column
from agl_core.trajectory.filters import is_kept
from agl_core.types.outcome import DropReason, TokenCoverage

TRUNCATED = "truncated"
"""Sampled tokens that were cut off a row that is in the batch."""
OTHER_CHOICES = "other_choices"
"""Tokens of a call's choices after the first one (`n` above 1)."""


def has_token_ids(triplets: pa.Table) -> pa.ChunkedArray:
    """Return which triplets have response ids; the others only count."""
    return pc.greater(pc.fill_null(pc.list_value_length(triplets["response_ids"]), 0), 0)


def count_lost_tokens(triplets: pa.Table) -> dict[str, int]:
    """Return by reason the tokens that the model server counts and no row has: those of triplets
    without ids, and those of further choices of a call.

    Args:
        triplets: Columns `response_ids` and, from version 3 on, `output_tokens`.
    """
    counted = pc.fill_null(column(triplets, "output_tokens", TRIPLETS), 0).to_numpy()
    recorded = pc.fill_null(pc.list_value_length(triplets["response_ids"]), 0).to_numpy()
    missing = np.maximum(counted - recorded, 0)
    lost = {
        DropReason.NO_TOKEN_IDS.value: int(missing[recorded == 0].sum()),
        OTHER_CHOICES: int(missing[recorded > 0].sum()),
    }
    return {reason: number for reason, number in lost.items() if number}


def recount_tokens(triplets: pa.Table, rows: pa.Table) -> TokenCoverage:
    """Return where sampled tokens went, counted in finished files.

    Args:
        triplets: Columns `response_ids` and, from version 3 on, `output_tokens`.
        rows: Schema `BATCH_ROWS`; of it what is sampled, weighted and dropped.
    """
    num_with_ids = pc.sum(pc.list_value_length(triplets["response_ids"])).as_py() or 0
    found, trained = _per_row(rows)
    cut = num_with_ids - int(found.sum())
    return _coverage(found, trained, cut, count_lost_tokens(triplets), rows)


def _per_row(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return [N] the sampled tokens of each row, and [N] those with loss weight.

    Raises:
        ValueError: A token has loss weight that was not sampled.
    """
    lengths = pc.list_value_length(rows["response_ids"]).to_numpy()
    row = np.repeat(np.arange(len(rows)), lengths)
    sampled = pc.is_valid(pc.list_flatten(rows["policy_versions"])).to_numpy()
    weighted = pc.list_flatten(rows["response_mask"]).to_numpy() > 0
    if (weighted & ~sampled).any():
        raise ValueError("a token that was not sampled has loss weight")
    found, trained = (np.bincount(row[of], minlength=len(rows)) for of in (sampled, weighted))
    return found, trained


def _coverage(
    found: np.ndarray, trained: np.ndarray, num_cut: int, lost: Mapping[str, int], rows: pa.Table
) -> TokenCoverage:
    reasons = rows["drop_reason"].to_numpy(zero_copy_only=False)
    kept = is_kept(reasons)
    dropped = {
        str(reason): int(found[reasons == reason].sum()) for reason in sorted(set(reasons[~kept]))
    }
    if num_cut:
        dropped[TRUNCATED] = num_cut
    dropped |= lost
    return TokenCoverage(
        sampled=int(found.sum()) + num_cut + sum(lost.values()),
        trained=int(trained[kept].sum()),
        masked=int((found - trained)[kept].sum()),
        dropped=dropped,
    )


def count_tokens(
    num_sampled: int,
    sampled_per_row: np.ndarray,
    rows: pa.Table,
    lost: Mapping[str, int] = MappingProxyType({}),
) -> TokenCoverage:
    """Return where sampled tokens went, counted in the finished rows.

    Args:
        num_sampled: Of all triplets with ids.
        sampled_per_row: [N] of the calls of each row.
        rows: Schema `BATCH_ROWS`, N of them.
        lost: Tokens that no triplet has, by reason.

    Raises:
        ValueError: A token is in no row and was not cut off one, or one has loss weight that was
            not sampled.
    """
    found, trained = _per_row(rows)
    cut = sampled_per_row - found
    is_cut = pc.fill_null(pc.match_substring(rows["truncated"], "response"), False).to_numpy()
    missing = num_sampled - int(sampled_per_row.sum()) + int(np.abs(cut[~is_cut]).sum())
    if missing or (cut < 0).any():
        raise ValueError(f"{missing} of {num_sampled} sampled tokens are in no row")
    return _coverage(found, trained, int(cut.sum()), lost, rows)
