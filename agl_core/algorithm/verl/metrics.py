"""Figures of one iteration's update, under the names that VERL's trainer gives them."""

import numpy as np
import pyarrow as pa

from agl_core.algorithm.verl.batch import RowBatch
from agl_core.algorithm.verl.worker import LogProbs
from agl_core.ledger.tables import UPDATE_METRICS


def iteration_metrics(batch: RowBatch, old: LogProbs, advantages: np.ndarray) -> dict[str, float]:
    """Return figures over the whole batch, before the first optimizer step.

    How far the policy that was served differs from the one that learns is measured over tokens
    with loss weight: `training/rollout_probs_diff_*` on probabilities as VERL does, and
    `training/rollout_log_probs_diff_*` in nats. Both are left out where the batch has no
    log-probs of the rollouts.

    Args:
        batch: The rows, R response tokens in all.
        old: Log-probs of the response tokens under the weights before the update.
        advantages: [R].
    """
    weighted = batch.response_mask > 0
    _, first = np.unique(batch.rollout, return_index=True)
    rewards = batch.rollout_reward[first]
    figures = {
        "batch/num_rows": len(batch),
        "batch/num_rollouts": len(first),
        "batch/num_weighted_tokens": weighted.sum(),
        "critic/rewards/mean": rewards.mean(),
        "critic/rewards/max": rewards.max(),
        "critic/rewards/min": rewards.min(),
        "prompt_length/mean": batch.prompt_lengths.mean(),
        "response_length/mean": batch.response_lengths.mean(),
    }
    if old.entropy is not None:
        figures["actor/entropy"] = old.entropy
    if weighted.any():
        figures["critic/advantages/max"] = advantages[weighted].max()
        figures["critic/advantages/min"] = advantages[weighted].min()
        if batch.rollout_logprobs is not None:
            rollout, actor = batch.rollout_logprobs[weighted], old.values[weighted]
            for name, difference in (
                ("log_probs", np.abs(rollout - actor)),
                ("probs", np.abs(np.exp(rollout) - np.exp(actor))),
            ):
                figures[f"training/rollout_{name}_diff_mean"] = difference.mean()
                figures[f"training/rollout_{name}_diff_max"] = difference.max()
    return {name: float(value) for name, value in figures.items()}


def metrics_table(steps: list[dict[str, float]], iteration: dict[str, float]) -> pa.Table:
    """Return metrics as `UPDATE_METRICS`, sorted by name within each step.

    Args:
        steps: Metrics of each optimizer step, in order.
        iteration: Metrics of the whole iteration; their step is null.
    """
    entries = [
        {"step": step, "name": name, "value": value}
        for step, values in [*enumerate(steps), (None, iteration)]
        for name, value in sorted(values.items())
    ]
    return pa.Table.from_pylist(entries, schema=UPDATE_METRICS)
