"""When the rewards of a group are equal: then they say nothing about which rollout was better."""

import numpy as np

TIE_TOLERANCE = 1e-6
"""Rewards of a group are nearly equal if their spread is at most this, or this fraction of the
largest one if that is above 1. VERL computes in float32, whose numbers near 1 are 1.2e-7 apart, and
GRPO adds 1e-6 to a group's standard deviation: a smaller spread is rounding, not a preference."""


def is_tied(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return [G] bool, whether each group's rewards are equal or nearly equal.

    Args:
        low: [G] the lowest reward of each group.
        high: [G] the highest one.
    """
    scale = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
    return high - low <= TIE_TOLERANCE * scale


def group_bounds(values: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest value of each group, [G] each.

    Args:
        values: [N]
        place: [N] the group's number, from 0 without gaps.
    """
    num_groups = int(place.max()) + 1 if len(place) else 0
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    return low, high
