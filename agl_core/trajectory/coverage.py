"""What became of every expected rollout and every built row, computed from the records."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.manifest import RewardSummary
from agl_core.types.outcome import CallCoverage, Coverage, DropReason, FailureKind, RowCoverage


def rollout_coverage(expected: int, outcomes: pa.Table, rows: pa.Table) -> Coverage:
    """Count the rollouts of a set by what became of them.

    Args:
        expected: Number of requests; rollouts are named by their place among them.
        outcomes: Columns `index`, `kind` and `final`, every attempt.
        rows: Columns `index`, `response_mask` and `drop_reason`, every built row.

    Raises:
        ValueError: The records contradict each other: two final attempts of one rollout, or rows of
            one that failed or was not expected.
    """
    final = outcomes.filter(outcomes["final"])
    ended, kinds = _integers(final["index"]), final["kind"].to_numpy()
    index, in_batch, weighted = _rows(rows)
    _check_ends(expected, ended)
    zeroed = ended[kinds == FailureKind.NO_REWARD.value]
    succeeded = ended[kinds == FailureKind.SUCCEEDED.value]
    built = np.unique(index)
    if len(strange := np.setdiff1d(built, np.union1d(succeeded, zeroed))):
        raise ValueError(f"rollout {strange[0]} has batch rows and did not end with a reward")

    trained = np.unique(index[in_batch & weighted])
    masked = np.setdiff1d(index[in_batch], trained)
    filtered, first = np.unique(index, return_index=True)
    is_left = ~np.isin(filtered, index[in_batch])
    filtered, first = filtered[is_left], first[is_left]
    has_failed = (kinds != FailureKind.SUCCEEDED.value) & ~np.isin(ended, built)
    failures = kinds[has_failed].tolist()
    num_known = len(trained) + len(masked) + len(filtered) + len(failures)
    return Coverage(
        expected=expected,
        trained=len(trained),
        masked=len(masked),
        filtered=len(filtered),
        failed=len(failures),
        omitted=0,
        unknown=expected - num_known,
        reasons=dict(Counter(rows["drop_reason"].take(first).to_pylist()) + Counter(failures)),
        rewards_by_policy=len(np.intersect1d(zeroed, built)),
    )


def row_coverage(rows: pa.Table) -> RowCoverage:
    """Count the built rows by what became of them (columns `index`, `response_mask` and
    `drop_reason`).
    """
    _, in_batch, weighted = _rows(rows)
    return RowCoverage(
        built=len(rows),
        trained=int((in_batch & weighted).sum()),
        masked=int((in_batch & ~weighted).sum()),
        dropped=dict(Counter(rows["drop_reason"].drop_null().to_pylist())),
    )


def call_coverage(num_sampled: int, rows: pa.Table) -> CallCoverage:
    """Count the sampled calls by what became of their rows.

    Args:
        num_sampled: Calls that sampled tokens, whether they can be trained on or not.
        rows: Columns `index`, `num_calls`, `response_mask` and `drop_reason`, every built row.

    Raises:
        ValueError: The rows have more calls than were sampled.
    """
    _, in_batch, weighted = _rows(rows)
    num_calls = _integers(rows["num_calls"])
    reasons = rows["drop_reason"].to_pylist()
    dropped: Counter[str] = Counter()
    for reason, number in zip(reasons, num_calls.tolist(), strict=True):
        if reason is not None:
            dropped[reason] += number
    if missing := num_sampled - int(num_calls.sum()):
        dropped[DropReason.NO_TOKEN_IDS.value] = missing
    if missing < 0:
        raise ValueError(f"{num_calls.sum()} calls are in rows, {num_sampled} were sampled")
    return CallCoverage(
        sampled=num_sampled,
        trained=int(num_calls[in_batch & weighted].sum()),
        masked=int(num_calls[in_batch & ~weighted].sum()),
        dropped=dict(dropped),
    )


def _rows(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of each row its rollout, whether it is in the batch, whether a token has weight."""
    masks = rows["response_mask"].combine_chunks()
    ends = np.cumsum(np.concatenate([[0], _integers(pc.list_value_length(masks))]))
    weights = np.concatenate([[0], np.cumsum(masks.flatten().to_numpy() != 0)])
    weighted = weights[ends[1:]] > weights[ends[:-1]]
    in_batch = pc.is_null(rows["drop_reason"]).to_numpy().astype(bool)
    return _integers(rows["index"]), in_batch, weighted


def _integers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return pc.cast(column, pa.int64()).to_numpy()


def _check_ends(expected: int, ended: np.ndarray) -> None:
    found, counts = np.unique(ended, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"rollout {found[counts > 1][0]} has more than one final attempt")
    if len(found) and not (found[0] >= 0 and found[-1] < expected):
        raise ValueError(f"rollout {found[-1]} ended; {expected} were expected")


def summarise_rewards(
    expected: int,
    outcomes: pa.Table,
    annotations: list[dict[str, Any]],
    *,
    pass_reward: float,
    policy_version: str,
) -> RewardSummary:
    """Summarise the rewards of a set; a rollout without a reward is counted, never taken as 0.

    Args:
        expected: Number of requests.
        outcomes: Schema `OUTCOMES`, every attempt.
        annotations: What the agents of the final attempts noted, one dict a rollout.
        pass_reward: A rollout passes from this reward on.
        policy_version: The policy that was sampled.
    """
    final = outcomes.filter(outcomes["final"])
    kinds = Counter(final["kind"].to_pylist())
    del kinds[FailureKind.SUCCEEDED.value]
    rewards = final.filter(pc.equal(final["kind"], FailureKind.SUCCEEDED.value))[
        "reward"
    ].to_numpy()
    return RewardSummary(
        expected=expected,
        rewarded=len(rewards),
        mean_reward=float(rewards.mean()) if len(rewards) else None,
        pass_rate=float((rewards >= pass_reward).mean()) if len(rewards) else None,
        annotations={
            name: float(np.mean([note[name] for note in annotations if name in note]))
            for name in sorted({name for note in annotations for name in note})
        },
        failures=dict(kinds),
        attempts=dict(Counter(outcomes["kind"].to_pylist())),
        policy_version=policy_version,
    )
