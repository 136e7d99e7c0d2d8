"""One VERL `TrainingWorker` in this process: log-probs, optimizer steps, checkpoints, export."""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from agl_core.algorithm.verl.batch import RowBatch, jagged, to_tensordict
from agl_core.algorithm.verl.build import (
    build_training_worker,
    leave_process_group,
    translated,
)
from agl_core.algorithm.verl.export import write_policy
from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.errors import TrainerError

with quiet_imports():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers.utils.padding import response_from_nested


@dataclass(frozen=True, slots=True)
class LogProbs:
    """What the current weights say about the response tokens of a batch."""

    values: np.ndarray
    """[R] float32 log-probs in nats, in the order of the rows."""
    entropy: float
    """Mean over the tokens with loss weight, in nats."""


def mini_batches(
    rows: np.ndarray, num_steps: int, shuffle_seed: tuple[int, ...] | None
) -> list[np.ndarray]:
    """Split the rows of one epoch over its optimizer steps, every row once.

    VERL counts inputs and expects `rollout.n` rows for each, so that all mini-batches are equal.
    Here the rows of a rollout vary in number, so the number of steps is what
    `ppo_mini_batch_size` decides, and rows are split over them as evenly as possible.

    Args:
        rows: [N] row positions.
        num_steps: Steps of one epoch; fewer where there are fewer rows.
        shuffle_seed: Seeds the order; None keeps it.

    Returns:
        One array of row positions for each step, sizes differing by at most one.
    """
    if shuffle_seed is not None:
        rows = np.random.default_rng(shuffle_seed).permutation(rows)
    return np.array_split(rows, min(num_steps, len(rows)))


class UpdateWorker:
    """Drives VERL's `TrainingWorker` on one rank."""

    def __init__(self, config: DictConfig, model_folder: Path, total_steps: int) -> None:
        """Build model, optimizer and scheduler.

        Args:
            config: Composed configuration; not changed.
            model_folder: Hugging Face folder with safetensors; `export` reads its layout again.
            total_steps: Iterations of the run, for the learning-rate schedule.

        Raises:
            TrainerError: VERL cannot build the worker, or this process has a torch process group
                already.
        """
        self._config = config
        self._model_folder = model_folder
        self._worker = build_training_worker(config, model_folder, total_steps)

    def close(self) -> None:
        """Free the model and leave the process group; the object cannot be used afterwards."""
        del self._worker
        leave_process_group()

    def log_probs(self, batch: RowBatch, temperature: float) -> LogProbs:
        """Return the log-prob of each response token under the current weights.

        Args:
            batch: The rows.
            temperature: Logits are divided by it, as they were in sampling.

        Raises:
            TrainerError: VERL failed, or a log-prob is not finite.
        """
        rollout = self._config.actor_rollout_ref.rollout
        micro_batch_size = min(len(batch), rollout.log_prob_micro_batch_size_per_gpu)
        data = _select(to_tensordict(batch), np.arange(len(batch)), batch, micro_batch_size)
        tensordict_utils.assign_non_tensor(
            data,
            temperature=temperature,
            calculate_entropy=True,
            compute_loss=False,
            micro_batch_size_per_gpu=micro_batch_size,
        )
        with translated("log-prob pass"):
            output = self._worker.infer_batch(data)
            num_tokens = len(batch.response_ids)  # what follows are filler rows
            values, entropy = (
                response_from_nested(output[name], data["response_mask"]).values()[:num_tokens]
                for name in ("log_probs", "entropy")
            )
        if not torch.isfinite(values).all():
            raise TrainerError("an old log-prob is not finite; are the policy's weights sound?")
        weight = torch.from_numpy(batch.response_mask)
        mean_entropy = float((entropy * weight).sum() / weight.sum().clamp(min=1))
        return LogProbs(values.float().numpy().copy(), mean_entropy)

    def update(
        self,
        batch: RowBatch,
        old_log_probs: np.ndarray,
        advantages: np.ndarray,
        *,
        step: int,
    ) -> list[dict[str, float]]:
        """Take the optimizer steps of one iteration by VERL's `ppo_loss`, then one step of the
        schedule.

        Each mini-batch goes through VERL's `train_batch`, which is what `train_mini_batch` loops
        over where all mini-batches are equal. Losses are normalised over the mini-batch: by its
        tokens with loss weight, or by its rows that have such a token. Rows without one add
        exactly nothing and are left out, so that no mini-batch is empty.

        Args:
            batch: The rows.
            old_log_probs: [R] float32, nats.
            advantages: [R] float32.
            step: Number of the iteration; seeds the order of rows together with
                `actor.data_loader_seed`.

        Returns:
            VERL's metrics of each optimizer step, in order; nothing about time or memory.

        Raises:
            TrainerError: VERL failed, no token has loss weight, or a loss or gradient is not
                finite. The weights may have changed: load a checkpoint before going on.
        """
        actor = self._config.actor_rollout_ref.actor
        data = to_tensordict(batch, old_log_probs=old_log_probs, advantages=advantages)
        starts = np.cumsum(batch.response_lengths) - batch.response_lengths
        rows = np.flatnonzero(np.add.reduceat(batch.response_mask, starts) > 0)
        if len(rows) == 0:
            raise TrainerError("no token of the batch has loss weight")
        num_steps = max(1, round(self._config.data.train_batch_size / actor.ppo_mini_batch_size))
        slices = [
            mini_batch
            for epoch in range(actor.ppo_epochs)
            for mini_batch in mini_batches(
                rows, num_steps, (actor.data_loader_seed, step, epoch) if actor.shuffle else None
            )
        ]
        metrics = []
        for number, mini_batch in enumerate(slices):
            micro_batch_size = min(len(mini_batch), actor.ppo_micro_batch_size_per_gpu)
            mini_data = _select(data, mini_batch, batch, micro_batch_size)
            tensordict_utils.assign_non_tensor(
                mini_data,
                temperature=self._config.actor_rollout_ref.rollout.temperature,
                calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
                global_batch_size=len(mini_batch),
                micro_batch_size_per_gpu=micro_batch_size,
                update_lr_scheduler=number == len(slices) - 1,
            )
            with translated("update"):
                output = self._worker.train_batch(mini_data)
            metrics.append(_step_metrics(tensordict_utils.get(output, "metrics"), number))
        return metrics

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Write model, optimizer, scheduler and RNG states in VERL's format.

        Raises:
            TrainerError: VERL failed.
        """
        with translated("checkpoint"), redirect_stdout(sys.stderr):
            self._worker.save_checkpoint(str(folder), global_step=step)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote; the next steps are as if nothing had happened
        between.

        VERL unpickles these files (`torch.load(weights_only=False)`): the caller has verified
        each file's sha256 against its own ledger, as `Artifacts.fetch_folder` does.

        Raises:
            TrainerError: The checkpoint was written by another number of ranks, or VERL failed.
        """
        if not (folder / "model_world_size_1_rank_0.pt").is_file():
            raise TrainerError(f"{folder} holds no checkpoint of one rank")
        with translated("checkpoint"), redirect_stdout(sys.stderr):
            self._worker.load_checkpoint(str(folder), del_local_after_load=False)

    def export(self, folder: Path) -> None:
        """Write the current weights as an ordinary Hugging Face folder.

        It mirrors the folder that the worker was built from; see `export.write_policy`.

        Args:
            folder: An existing empty folder.

        Raises:
            TrainerError: The model folder has no safetensors, or a tensor that the model lacks.
        """
        with translated("export"):
            tensors, _ = self._worker.engine.get_per_tensor_param()
            weights = {name: tensor.detach().cpu() for name, tensor in tensors}
            write_policy(weights, self._model_folder, folder)


def _select(
    data: TensorDict, rows: np.ndarray, batch: RowBatch, micro_batch_size: int
) -> TensorDict:
    """Return some rows, filled up to full micro-batches by short rows of no loss weight.

    VERL refuses a mini-batch that its micro-batches do not divide.
    """
    num_fillers = -len(rows) % micro_batch_size
    shortest = rows[np.argmin((batch.prompt_lengths + batch.response_lengths)[rows])]
    indices = np.concatenate([rows, np.full(num_fillers, shortest)])
    selected = tensordict_utils.index_select_tensor_dict(data, torch.from_numpy(indices))
    if num_fillers:
        lengths = batch.response_lengths[indices]
        mask: Any = selected["response_mask"]
        values = mask.values().clone()
        values[lengths[: len(rows)].sum() :] = 0
        selected["response_mask"] = selected["loss_mask"] = jagged(values, lengths)
    lengths = (batch.prompt_lengths + batch.response_lengths)[rows].tolist()
    tensordict_utils.assign_non_tensor_data(selected, "global_token_num", lengths)
    return selected


def _step_metrics(metrics: dict[str, Any], number: int) -> dict[str, float]:
    """Reduce one step's metrics over micro-batches as VERL does, and check that they are finite."""
    reduced = {}
    for name, value in metrics.items():
        if name == "mfu" or name.startswith("perf/"):  # differ from run to run
            continue
        if isinstance(value, list) and isinstance(value[0], Metric):
            reduced[name] = Metric.aggregate_dp(value)
        else:
            reduced[name] = reduce_metrics({name: value})[name]
    named = {name: float(value) for name, value in rename_dict(reduced, "actor/").items()}
    for name in ("actor/loss", "actor/grad_norm"):
        if not np.isfinite(named[name]):
            raise TrainerError(f"optimizer step {number}: {name} is {named[name]}")
    return named
