"""One iteration's update from rows to new weights, in the order of VERL's trainer.

log-probs (old, reference), values -> KL penalty on rewards -> rollout correction -> advantages ->
critic's steps -> policy's steps. Every row that does not reach the policy's loss has a reason.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from omegaconf import DictConfig

from agl_core.algorithm.verl import correction
from agl_core.algorithm.verl.advantage import Advantages, estimate
from agl_core.algorithm.verl.batch import RowBatch
from agl_core.algorithm.verl.build import translated
from agl_core.algorithm.verl.metrics import iteration_metrics
from agl_core.algorithm.verl.per_rollout import rollout_weights
from agl_core.algorithm.verl.worker import LogProbs, UpdateWorker
from agl_core.errors import TrainerError
from agl_core.ledger.tables import UPDATE_ROWS
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.outcome import DropReason


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did."""

    rows: pa.Table
    """Schema `UPDATE_ROWS`: what it saw of each row, and why a row did not reach the loss."""
    steps: list[dict[str, float]]
    """Metrics of each optimizer step; the critic's and the policy's of one number side by side.
    Empty where no row reached the loss, so that nothing changed."""
    metrics: dict[str, float]
    """Metrics of the whole iteration."""
    kl_coefficient: float
    """Of the penalty on the next iteration's rewards."""


def learn(
    worker: UpdateWorker,
    batch: RowBatch,
    config: DictConfig,
    settings: BatchSettings,
    *,
    step: int,
    kl_coefficient: float,
) -> Update:
    """Change the worker's weights by one iteration.

    Args:
        worker: Holds the weights before the update.
        batch: The rows.
        config: Composed configuration that the worker was built from.
        settings: How the rows were built.
        step: Number of the iteration, from 0.
        kl_coefficient: Of the penalty on rewards, where there is one.

    Raises:
        TrainerError: The batch cannot be learned from, no row reaches the loss and the settings do
            not skip such a batch, or VERL failed. The weights may have changed: load a checkpoint
            before going on.
    """
    algorithm = config.algorithm
    temperature = config.actor_rollout_ref.rollout.temperature
    is_bypassed = algorithm.rollout_correction.bypass_mode
    old = (
        LogProbs(correction.rollout_logprobs(batch), None)
        if is_bypassed
        else worker.log_probs(batch, temperature)
    )
    more: dict[str, np.ndarray] = {}
    metrics: dict[str, float] = {}
    if worker.has_reference:
        more["ref_log_prob"] = worker.reference_log_probs(batch, temperature)
    values = worker.values(batch) if worker.has_critic else None
    token_rewards = batch.token_rewards
    if algorithm.use_kl_in_reward:
        from agl_core.algorithm.verl.kl import penalise  # loads VERL's Ray trainer

        penalised = penalise(batch, old.values, more["ref_log_prob"], algorithm, kl_coefficient)
        token_rewards, kl_coefficient = penalised.token_rewards, penalised.coefficient
        metrics |= penalised.metrics
    if not config.actor_rollout_ref.actor.use_kl_loss:
        more.pop("ref_log_prob", None)
    with translated("advantages"):
        corrected = batch
        if correction.is_on(algorithm.rollout_correction) and not is_bypassed:
            found = correction.correct(batch, old.values, algorithm.rollout_correction)
            corrected = replace(batch, response_mask=found.response_mask)
            metrics |= found.metrics
            if found.weights is not None:
                more["rollout_is_weights"] = found.weights
        advantages = estimate(
            corrected,
            algorithm,
            token_rewards,
            by_step=settings.level == "transition"
            and settings.credit in ("per_call", "discounted"),
            min_group_size=settings.min_group_size,
            values=values,
        )
    reasons = _drop_reasons(batch, corrected, advantages)
    trained = _without(corrected, reasons)
    metrics |= iteration_metrics(trained, old, advantages.values) | _dropped(reasons)
    metrics |= {
        "batch/equal_groups": float(advantages.equal_groups),
        "batch/near_equal_groups": float(advantages.near_equal_groups),
    }
    rows = update_rows(batch, old.values, advantages.values, reasons)
    if trained.response_mask.any():
        steps, of_critic = _steps(worker, trained, config, old, advantages, values, more, step)
        metrics |= of_critic
    elif settings.on_empty == "skip":
        steps = []
    else:
        raise TrainerError(
            f"no token of the batch has loss weight; rows: {dict(Counter(reasons))}; "
            "agentlightning.filter.on_empty=skip goes on without an update"
        )
    return Update(rows, steps, metrics, kl_coefficient)


def _steps(
    worker: UpdateWorker,
    trained: RowBatch,
    config: DictConfig,
    old: LogProbs,
    advantages: Advantages,
    values: np.ndarray | None,
    more: dict[str, np.ndarray],
    step: int,
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Take the critic's and the policy's optimizer steps; return their metrics, and those of the
    critic before its steps.
    """
    steps: list[dict[str, float]] = []
    metrics: dict[str, float] = {}
    if values is not None:
        assert advantages.returns is not None
        steps = worker.update_critic(trained, values, advantages.returns, step=step)
        metrics = _critic_metrics(trained, values, advantages.returns)
    if step + 1 >= config.trainer.critic_warmup:
        in_loss = advantages.values
        if config.agentlightning.loss.per_rollout:
            aggregation = config.actor_rollout_ref.actor.loss_agg_mode
            in_loss = in_loss * rollout_weights(trained, aggregation)
        policy_steps = worker.update(trained, old.values, in_loss, step=step, more=more)
        steps = _side_by_side(steps, policy_steps)
    return steps, metrics


def _dropped(reasons: np.ndarray) -> dict[str, float]:
    """Return the number of rows that do not reach the loss by reason."""
    counts = Counter(reason for reason in reasons if reason is not None)
    return {f"batch/dropped_rows/{reason}": float(count) for reason, count in counts.items()}


def _drop_reasons(batch: RowBatch, corrected: RowBatch, advantages: Advantages) -> np.ndarray:
    """Return [N] why each row does not reach the loss; None where it does."""
    reasons = np.full(len(batch), None, dtype=object)
    reasons[~advantages.has_peers] = DropReason.NO_PEER_AT_STEP.value
    reasons[corrected.weighted_tokens() == 0] = DropReason.REJECTED.value
    reasons[batch.weighted_tokens() == 0] = DropReason.NO_WEIGHT.value
    return reasons


def _without(batch: RowBatch, reasons: np.ndarray) -> RowBatch:
    """Return the batch with no loss weight on rows that have a reason."""
    kept = np.array([reason is None for reason in reasons])
    mask = np.where(np.repeat(kept, batch.response_lengths), batch.response_mask, 0)
    return replace(batch, response_mask=mask)


def _critic_metrics(batch: RowBatch, values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Return figures of VERL's trainer about the critic before its steps."""
    weighted = batch.response_mask > 0
    values, returns = values[weighted], returns[weighted]
    unexplained = np.var(returns - values) / (np.var(returns) + 1e-5)
    return {
        "critic/values/mean": float(values.mean()),
        "critic/returns/mean": float(returns.mean()),
        "critic/vf_explained_var": float(1.0 - unexplained),
    }


def _side_by_side(
    critic: list[dict[str, float]], policy: list[dict[str, float]]
) -> list[dict[str, float]]:
    """Return metrics by number of the optimizer step."""
    return [
        (critic[k] if k < len(critic) else {}) | (policy[k] if k < len(policy) else {})
        for k in range(max(len(critic), len(policy)))
    ]


def update_rows(
    batch: RowBatch, old_log_probs: np.ndarray, advantages: np.ndarray, reasons: np.ndarray
) -> pa.Table:
    """Return what an update saw of each row, as `UPDATE_ROWS`.

    Args:
        batch: The rows.
        old_log_probs: [R] float32, nats.
        advantages: [R] float32.
        reasons: [N] why a row did not reach the loss; None where it did.
    """
    offsets = np.concatenate([[0], np.cumsum(batch.response_lengths)]).astype(np.int32)
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32()))
        for values in (old_log_probs, advantages)
    ]
    reason_column = pa.array(reasons, pa.string())
    return pa.table([pa.array(batch.row, pa.int32()), *columns, reason_column], schema=UPDATE_ROWS)
