"""The penalty on rewards for leaving the reference policy, by VERL's `apply_kl_penalty`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig

from agl_core.algorithm.verl.batch import Padding, RowBatch
from agl_core.algorithm.verl.platform_cpu import quiet_imports

with quiet_imports():
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_kl_controller
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty


@dataclass(frozen=True, slots=True)
class Penalised:
    """Rewards after the penalty."""

    token_rewards: np.ndarray
    """[R] float32."""
    coefficient: float
    """Of the next iteration; an adaptive controller moves it."""
    metrics: dict[str, float]


def penalise(
    batch: RowBatch,
    log_probs: np.ndarray,
    reference: np.ndarray,
    algorithm: DictConfig,
    coefficient: float,
) -> Penalised:
    """Subtract the penalty from the reward of each token with loss weight.

    Args:
        batch: The rows.
        log_probs: [R] of the policy before the update, nats.
        reference: [R] of the reference policy.
        algorithm: VERL's section of that name.
        coefficient: Of this iteration.
    """
    controller: Any = get_kl_controller(algorithm.kl_ctrl)
    controller.value = coefficient
    padding = Padding(batch.response_lengths)
    data = DataProto.from_dict(
        tensors={
            "response_mask": padding.pad(batch.response_mask),
            "token_level_scores": padding.pad(batch.token_rewards),
            "old_log_probs": padding.pad(log_probs),
            "ref_log_prob": padding.pad(reference),
        }
    )
    data, metrics = apply_kl_penalty(data, controller, kl_penalty=algorithm.kl_penalty)
    rewards = padding.flatten(data.batch["token_level_rewards"])
    return Penalised(rewards, float(controller.value), metrics)
