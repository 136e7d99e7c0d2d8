"""Which rows are kept out of a batch, each with its reason."""

import numpy as np

from agl_core.trajectory.cut import Limit
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.outcome import DropReason

EQUAL_TOLERANCE = 1e-6
"""Rewards of a group count as equal if they differ by no more than this, or by this fraction of the
largest: a sum of float rewards differs in its last digits by the order of its terms, and an
estimator that divides by the group's standard deviation would make that the whole signal."""


def are_equal(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return [N] bool, whether rewards between these bounds count as equal.

    Args:
        low: [N] lowest reward of each group.
        high: [N] highest.
    """
    return high - low <= EQUAL_TOLERANCE * np.maximum(1.0, np.maximum(abs(low), abs(high)))


def row_reasons(
    settings: BatchSettings,
    *,
    at_temperature: np.ndarray,
    as_asked: np.ndarray,
    unusable: np.ndarray,
    prompt: Limit,
    response: Limit,
    unfinished: np.ndarray,
) -> np.ndarray:
    """Return for each of N rows why it is dropped on its own account; the first reason counts.

    Args:
        settings: Says what becomes of unfinished rows.
        at_temperature: [N] bool, sampled at the run's temperature.
        as_asked: [N] bool, sampled from the run's distribution.
        unusable: [N] bool, without a reward that counts.
        prompt: Of the N rows.
        response: Of the N rows.
        unfinished: [N] bool, whether the last response was cut off.

    Returns:
        [N] strings, None for the rows that are left.
    """
    rules = (
        (~at_temperature, DropReason.OTHER_TEMPERATURE),
        (~as_asked, DropReason.OTHER_SAMPLING),
        (unusable, DropReason.UNUSABLE_REWARD),
        (prompt.is_exceeded("drop"), DropReason.PROMPT_TOO_LONG),
        (response.is_exceeded("drop"), DropReason.RESPONSE_TOO_LONG),
        (unfinished & (settings.unfinished == "drop"), DropReason.UNFINISHED),
    )
    reasons = np.full(len(at_temperature), None, dtype=object)
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
    few, or (with two or more) all with one reward (`are_equal`).

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
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, place, rollout_reward[rollouts])
    np.maximum.at(high, place, rollout_reward[rollouts])
    small = names[sizes < settings.min_group_size]
    equal = names[are_equal(low, high) & (sizes > 1)] if settings.drop_equal_rewards else names[:0]
    found = reasons.copy()
    found[kept[np.isin(group[kept], equal)]] = DropReason.EQUAL_REWARDS.value
    found[kept[np.isin(group[kept], small)]] = DropReason.GROUP_TOO_SMALL.value
    return found


def is_kept(reasons: np.ndarray) -> np.ndarray:
    """Return [N] bool, True for rows without a reason."""
    return np.fromiter((reason is None for reason in reasons), dtype=bool, count=len(reasons))
