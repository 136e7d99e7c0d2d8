"""What became of every expected rollout and every built row, computed from the records."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.manifest import RewardSummary
from agl_core.types.outcome import Coverage, FailureKind, RowCoverage


def rollout_coverage(expected: int, outcomes: pa.Table, rows: pa.Table) -> Coverage:
    """Count the rollouts of a set by what became of them.

    Args:
        expected: Number of requests.
        outcomes: Schema `OUTCOMES`, every attempt.
        rows: Schema `BATCH_ROWS`, every built row.

    Raises:
        ValueError: The counts do not add up to `expected`.
    """
    final = outcomes.filter(outcomes["final"])
    succeeded = pc.equal(final["kind"], FailureKind.SUCCEEDED.value)
    failures = Counter(final.filter(pc.invert(succeeded))["kind"].to_pylist())
    finished = set(final.filter(succeeded)["index"].to_pylist())
    kept = rows.filter(pc.is_null(rows["drop_reason"]))
    in_batch = set(kept["index"].to_pylist())
    trained = set(kept.filter(_has_weight(kept["response_mask"]))["index"].to_pylist())
    dropped = rows.filter(pc.is_valid(rows["drop_reason"]))
    first_reason: dict[int, str] = {}
    for index, reason in zip(
        dropped["index"].to_pylist(), dropped["drop_reason"].to_pylist(), strict=True
    ):
        first_reason.setdefault(index, reason)
    filtered = {index: why for index, why in first_reason.items() if index not in in_batch}
    unknown = expected - sum(failures.values()) - len(in_batch) - len(filtered)
    assert in_batch <= finished, "a row was built from a rollout that did not succeed"
    return Coverage(
        expected=expected,
        trained=len(trained),
        masked=len(in_batch - trained),
        filtered=len(filtered),
        failed=sum(failures.values()),
        omitted=0,
        unknown=unknown,
        reasons=dict(Counter(filtered.values()) + failures),
    )


def _has_weight(masks: pa.ChunkedArray) -> pa.Array:
    """Return for each row whether some token of it has loss weight."""
    parents = pc.list_parent_indices(masks.combine_chunks()).to_numpy()
    weights = np.bincount(parents, pc.list_flatten(masks).to_numpy(), minlength=len(masks))
    return pa.array(weights > 0)


def row_coverage(rows: pa.Table) -> RowCoverage:
    """Count the built rows by what became of them (schema `BATCH_ROWS`)."""
    reasons = rows["drop_reason"].drop_null().to_pylist()
    return RowCoverage(
        built=len(rows), trained=len(rows) - len(reasons), dropped=dict(Counter(reasons))
    )


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
        policy_version=policy_version,
    )
