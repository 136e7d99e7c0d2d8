"""What became of the tokens that the policy sampled."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.tables import TRIPLETS, column
from agl_core.trajectory.filters import is_kept
from agl_core.types.outcome import DropReason, TokenCoverage

TRUNCATED = "truncated"
"""Sampled tokens that were cut off a row that is in the batch."""


def has_token_ids(triplets: pa.Table) -> pa.ChunkedArray:
    """Return which triplets have response ids; the others only count."""
    return pc.greater(pc.fill_null(pc.list_value_length(triplets["response_ids"]), 0), 0)


def count_lost_tokens(triplets: pa.Table) -> int:
    """Return the tokens of the triplets without ids, by the model server's count.

    Args:
        triplets: Columns `response_ids` and, from version 3 on, `output_tokens`.
    """
    lost = triplets.filter(pc.invert(has_token_ids(triplets)))
    return pc.sum(column(lost, "output_tokens", TRIPLETS)).as_py() or 0


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
    found: np.ndarray, trained: np.ndarray, num_cut: int, num_lost: int, rows: pa.Table
) -> TokenCoverage:
    reasons = rows["drop_reason"].to_numpy(zero_copy_only=False)
    kept = is_kept(reasons)
    dropped = {
        str(reason): int(found[reasons == reason].sum()) for reason in sorted(set(reasons[~kept]))
    }
    if num_cut:
        dropped[TRUNCATED] = num_cut
    if num_lost:
        dropped[DropReason.NO_TOKEN_IDS.value] = num_lost
    return TokenCoverage(
        sampled=int(found.sum()) + num_cut + num_lost,
        trained=int(trained[kept].sum()),
        masked=int((found - trained)[kept].sum()),
        dropped=dropped,
    )


def count_tokens(
    num_sampled: int, sampled_per_row: np.ndarray, rows: pa.Table, num_lost: int = 0
) -> TokenCoverage:
    """Return where sampled tokens went, counted in the finished rows.

    Args:
        num_sampled: Of all triplets with ids.
        sampled_per_row: [N] of the calls of each row.
        rows: Schema `BATCH_ROWS`, N of them.
        num_lost: Tokens of the triplets without ids.

    Raises:
        ValueError: A token is in no row and was not cut off one, or one has loss weight that was
            not sampled.
    """
    found, trained = _per_row(rows)
    cut = sampled_per_row - found
    is_cut = pc.fill_null(pc.match_substring(rows["truncated"], "response"), False).to_numpy()
    lost = num_sampled - int(sampled_per_row.sum()) + int(np.abs(cut[~is_cut]).sum())
    if lost or (cut < 0).any():
        raise ValueError(f"{lost} of {num_sampled} sampled tokens are in no row")
    return _coverage(found, trained, int(cut.sum()), num_lost, rows)
