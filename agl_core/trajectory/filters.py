"""Which rows are kept out of a batch, each with its reason."""

import numpy as np

from agl_core.trajectory.cut import Limit
from agl_core.trajectory.settings import BatchSettings
from agl_core.trajectory.ties import group_bounds, is_tied
from agl_core.types.outcome import DropReason


def row_reasons(
    settings: BatchSettings,
    *,
    comparable: np.ndarray,
    unusable: np.ndarray,
    prompt: Limit,
    response: Limit,
    unfinished: np.ndarray,
) -> np.ndarray:
    """Return for each of N rows why it is dropped on its own account; the first reason counts.

    Args:
        settings: Says what becomes of unfinished rows.
        comparable: [N] bool, sampled at the run's temperature.
        unusable: [N] bool, without a reward that counts.
        prompt: Of the N rows.
        response: Of the N rows.
        unfinished: [N] bool, whether the length limit ended the last response.

    Returns:
        [N] strings, None for the rows that are left.
    """
    rules = (
        (~comparable, DropReason.OTHER_TEMPERATURE),
        (unusable, DropReason.UNUSABLE_REWARD),
        (prompt.is_exceeded("drop"), DropReason.PROMPT_TOO_LONG),
        (response.is_exceeded("drop"), DropReason.RESPONSE_TOO_LONG),
        (unfinished & (settings.unfinished == "drop"), DropReason.UNFINISHED),
    )
    reasons = np.full(len(comparable), None, dtype=object)
    for applies, reason in reversed(rules):
        reasons[applies] = reason.value
    return reasons


def drop_groups(
    reasons: np.ndarray,
    settings: BatchSettings,
    *,
    group: np.ndarray,
    index: np.ndarray,
    rollout_reward: np.ndarray,
) -> np.ndarray:
    """Return the reasons with those of groups added: of their rollouts that have a row left, too
    few, or (with two or more) all with one reward (`ties.is_tied`).

    Args:
        reasons: [N] of `row_reasons`.
        settings: `min_group_size` and `drop_equal_rewards`.
        group: [N]
        index: [N] of the rollout.
        rollout_reward: [N] one value a rollout.
    """
    kept = np.flatnonzero(is_kept(reasons))
    _, first = np.unique(index[kept], return_index=True)
    rollouts = kept[first]
    names, place, sizes = np.unique(group[rollouts], return_inverse=True, return_counts=True)
    tied = is_tied(*group_bounds(rollout_reward[rollouts], place))
    small = names[sizes < settings.min_group_size]
    equal = names[tied & (sizes > 1)] if settings.drop_equal_rewards else names[:0]
    found = reasons.copy()
    found[kept[np.isin(group[kept], equal)]] = DropReason.EQUAL_REWARDS.value
    found[kept[np.isin(group[kept], small)]] = DropReason.GROUP_TOO_SMALL.value
    return found


def is_kept(reasons: np.ndarray) -> np.ndarray:
    """Return [N] bool, True for rows without a reason."""
    return np.fromiter((reason is None for reason in reasons), dtype=bool, count=len(reasons))
