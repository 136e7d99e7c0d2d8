"""Importance weights and rejection for what separates the policy that sampled from the one that
learns, by VERL's rollout correction.
"""

from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig

from agl_core.algorithm.verl.batch import Padding, RowBatch
from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.errors import TrainerError

with quiet_imports():
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask


@dataclass(frozen=True, slots=True)
class Correction:
    """What a correction makes of a batch."""

    weights: np.ndarray | None
    """[R] float32, factors of the policy loss; None without importance sampling."""
    response_mask: np.ndarray
    """[R] int64, the batch's without rejected tokens."""
    metrics: dict[str, float]


def is_on(settings: DictConfig) -> bool:
    """Say whether `algorithm.rollout_correction` changes the loss."""
    return bool(settings.rollout_is or settings.rollout_rs or settings.bypass_mode)


def rollout_logprobs(batch: RowBatch) -> np.ndarray:
    """Return [R] the log-probs that the rollouts recorded.

    Raises:
        TrainerError: Some token has none.
    """
    if batch.rollout_logprobs is None:
        raise TrainerError("rollout correction: the batch has tokens without recorded log-probs")
    return batch.rollout_logprobs


def correct(batch: RowBatch, old_log_probs: np.ndarray, settings: DictConfig) -> Correction:
    """Compare the log-probs that the rollouts recorded with those of the policy before the update.

    Args:
        batch: The rows.
        old_log_probs: [R] nats.
        settings: `algorithm.rollout_correction`.

    Raises:
        TrainerError: The batch has tokens without recorded log-probs.
    """
    padding = Padding(batch.response_lengths)
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=padding.pad(old_log_probs),
        rollout_log_prob=padding.pad(rollout_logprobs(batch)),
        response_mask=padding.pad(batch.response_mask),
        rollout_is=settings.rollout_is,
        rollout_is_threshold=settings.rollout_is_threshold,
        rollout_is_batch_normalize=settings.rollout_is_batch_normalize,
        rollout_rs=settings.rollout_rs,
        rollout_rs_threshold=settings.rollout_rs_threshold,
    )
    return Correction(
        None if weights is None else padding.flatten(weights.batch["rollout_is_weights"]),
        padding.flatten(mask).astype(np.int64),
        metrics,
    )
