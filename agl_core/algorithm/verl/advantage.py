"""Advantages of response tokens, by VERL's estimators over the right units.

Outcome estimators (`estimators.OUTCOME`) compare one value of each unit within its group. A unit
is a rollout, with all tokens of all its rows, so that a group's statistics do not depend on the
number of turns. Where each call has a credit of its own, a unit is one row, and call k of a rollout
is compared with call k of its group's other rollouts. VERL's estimator gets each unit as one
response, and its result goes to every token with loss weight of the unit::

    rows      rollout 7: [t t] and [t t t], rollout 8: [t t]      group 3
    estimator 7: length 5, reward 1.0;  8: length 2, reward 0.0   uid 3
    tokens    7: +0.7 on five tokens,   8: -0.7 on two

A group whose rewards are all equal (`agl_core.trajectory.filters.are_equal`) has the advantage 0.0
on every token. VERL subtracts a float32 mean, which for rewards of 0.7 is off in the last place,
and adds only 1e-6 to the standard deviation: that gives +0.056 on every token.

Token-level estimators (`estimators.TOKEN`) get the rows as they are.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from omegaconf import DictConfig

from agl_core.algorithm.verl.batch import Padding, RowBatch
from agl_core.algorithm.verl.estimators import NORMALISED, OUTCOME
from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.errors import TrainerError
from agl_core.trajectory.filters import are_equal

with quiet_imports():
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator says of a batch's response tokens."""

    values: np.ndarray
    """[R] float32; 0 where the token has no loss weight."""
    returns: np.ndarray | None
    """[R] float32, what the critic learns; None without one."""
    has_peers: np.ndarray
    """[N] bool; False where a row has nothing to be compared with, so that its advantage is 0."""
    equal_groups: int = 0
    """Compared groups whose rewards are all the same."""
    near_equal_groups: int = 0
    """Further ones whose rewards count as equal."""


def estimate(
    batch: RowBatch,
    algorithm: DictConfig,
    token_rewards: np.ndarray,
    *,
    by_step: bool = False,
    min_group_size: int = 2,
    values: np.ndarray | None = None,
) -> Advantages:
    """Return the advantage of each response token.

    Args:
        batch: The rows.
        algorithm: VERL's section of that name.
        token_rewards: [R] float32; what they differ by from the batch's own (a KL penalty) also
            counts in the one value of a rollout.
        by_step: Outcome estimators compare rows of the same step, not rollouts.
        min_group_size: Rows that fewer rollouts than that have at their step get no advantage.
        values: [R] the critic's, for `gae`.

    Raises:
        TrainerError: A group has one rollout; VERL would take its raw reward as its advantage.
    """
    weighted = batch.response_mask > 0
    if algorithm.adv_estimator in OUTCOME:
        found = _outcome(batch, algorithm, token_rewards, by_step, min_group_size)
        per_token = np.repeat(found.values, batch.response_lengths)
        return replace(found, values=np.where(weighted, per_token, 0).astype(np.float32))
    everywhere = np.ones(len(batch), dtype=bool)
    if not weighted.any():  # VERL would whiten over no token
        return Advantages(np.zeros(len(weighted), dtype=np.float32), None, everywhere)
    padding = Padding(batch.response_lengths)
    inputs: dict[str, Any] = {
        "token_level_rewards": padding.pad(token_rewards),
        "response_mask": padding.pad(batch.response_mask.astype(np.float32)),
    }
    if algorithm.adv_estimator == "gae":
        assert values is not None, "gae needs the critic's values"
        inputs |= {"values": padding.pad(values), "gamma": algorithm.gamma, "lam": algorithm.lam}
    else:
        inputs["config"] = algorithm
    advantages, returns = map(
        padding.flatten, get_adv_estimator_fn(algorithm.adv_estimator)(**inputs)
    )
    if algorithm.adv_estimator == "reinforce_plus_plus":  # compares with the whole batch
        compared = returns[weighted]
        if are_equal(compared.min(), compared.max()):
            advantages = np.zeros_like(advantages)
    return Advantages(np.where(weighted, advantages, 0).astype(np.float32), returns, everywhere)


def _outcome(
    batch: RowBatch,
    algorithm: DictConfig,
    token_rewards: np.ndarray,
    by_step: bool,
    min_group_size: int,
) -> Advantages:
    """Return each row's advantage, [N] float64, and whether its unit was compared."""
    starts = np.cumsum(batch.response_lengths) - batch.response_lengths
    penalties = np.add.reduceat(
        token_rewards.astype(np.float64) - batch.token_rewards.astype(np.float64), starts
    )
    if by_step:
        unit = first = np.arange(len(batch))
        groups = np.unique(np.stack([batch.group, batch.step]), axis=1, return_inverse=True)[1]
        groups = groups.reshape(-1)
        rewards = batch.reward + penalties
    else:
        _, first, unit = np.unique(batch.rollout, return_index=True, return_inverse=True)
        groups = batch.group[first]
        rewards = batch.rollout_reward[first] + np.bincount(unit, penalties)
    lengths = np.bincount(unit, batch.weighted_tokens()).astype(np.int64)
    _, position, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    compared = sizes[position] >= (min_group_size if by_step else 2)
    if not by_step and not compared.all():
        group = groups[~compared][0]
        raise TrainerError(f"group {group} has one rollout, too few to compare")
    advantages = np.zeros(len(first))
    if compared.any():
        advantages[compared] = _of_units(
            algorithm, rewards[compared], lengths[compared], groups[compared]
        )
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, position, rewards)
    np.maximum.at(high, position, rewards)
    is_compared = np.bincount(position, compared) > 0
    same, equal = is_compared & (low == high), is_compared & are_equal(low, high)
    advantages[equal[position]] = 0.0
    num_same = int(same.sum())
    return Advantages(advantages[unit], None, compared[unit], num_same, int(equal.sum()) - num_same)


def _of_units(
    algorithm: DictConfig, rewards: np.ndarray, lengths: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Return VERL's advantage of each unit, given to it as one response of that length."""
    mask = (np.arange(max(1, lengths.max())) < lengths[:, None]).astype(np.float32)
    token_level_rewards = np.zeros_like(mask)
    token_level_rewards[:, 0] = rewards
    inputs: dict[str, Any] = {"index": groups, "config": algorithm}
    if algorithm.adv_estimator in NORMALISED:
        inputs["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std_in_grpo
    advantages, _ = get_adv_estimator_fn(algorithm.adv_estimator)(
        token_level_rewards=torch.from_numpy(token_level_rewards),
        response_mask=torch.from_numpy(mask),
        **inputs,
    )
    return advantages[:, 0].numpy()
