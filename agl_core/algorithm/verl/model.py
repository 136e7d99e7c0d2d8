"""One model of an update in this process, behind VERL's `TrainingWorker`: forward passes, optimizer
steps, checkpoints.
"""

import sys
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agl_core.algorithm.verl import checkpoint
from agl_core.algorithm.verl.batch import RowBatch, jagged, to_tensordict
from agl_core.algorithm.verl.build import leave_process_group, translated
from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.errors import TrainerError

with quiet_imports():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.padding import response_from_nested


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


class Model:
    """Drives one `TrainingWorker` on one rank.

    Args:
        worker: As `build` makes it.
        prefix: Of its metrics, `actor/` or `critic/`.
    """

    def __init__(self, worker: TrainingWorker, prefix: str = "") -> None:
        self.worker = worker
        self._prefix = prefix

    def close(self) -> None:
        """Free the model and leave the process group; the object cannot be used afterwards."""
        del self.worker
        leave_process_group()

    def infer(
        self, batch: RowBatch, names: Iterable[str], micro_batch_size: int, **settings: Any
    ) -> dict[str, np.ndarray]:
        """Return outputs of a forward pass for each response token.

        Args:
            batch: The rows.
            names: Outputs of VERL's engine: `log_probs`, `entropy`, `values`.
            micro_batch_size: Rows of one forward pass.
            settings: What the engine reads beside the tensors.

        Returns:
            [R] float32 by name, in the order of the rows.

        Raises:
            TrainerError: VERL failed, or a number is not finite.
        """
        micro_batch_size = min(len(batch), micro_batch_size)
        data = _select(to_tensordict(batch), np.arange(len(batch)), batch, micro_batch_size)
        tensordict_utils.assign_non_tensor(
            data, compute_loss=False, micro_batch_size_per_gpu=micro_batch_size, **settings
        )
        num_tokens = len(batch.response_ids)  # what follows are filler rows
        found = {}
        with translated("forward pass"), _of_a_critic():
            output = self.worker.infer_batch(data)
            for name in names:
                values = response_from_nested(output[name], data["response_mask"]).values()
                found[name] = values[:num_tokens].float().cpu().numpy().copy()
        for name, values in found.items():
            if not np.isfinite(values).all():
                raise TrainerError(f"the model's {name} are not all finite; are its weights sound?")
        return found

    def train(
        self,
        batch: RowBatch,
        columns: dict[str, np.ndarray],
        slices: list[np.ndarray],
        micro_batch_size: int,
        **settings: Any,
    ) -> list[dict[str, float]]:
        """Take one optimizer step for each mini-batch, then one step of the schedule.

        Each mini-batch goes through VERL's `train_batch`, which is what `train_mini_batch` loops
        over where all mini-batches are equal. Losses are normalised over the mini-batch: by its
        tokens with loss weight, or by its rows that have such a token.

        Args:
            batch: The rows.
            columns: What the loss reads, each [R] float32.
            slices: Row positions of each mini-batch; every row has a token with loss weight.
            micro_batch_size: Rows of one forward pass.
            settings: What the engine reads beside the tensors.

        Returns:
            VERL's metrics of each optimizer step, in order; nothing about time or memory.

        Raises:
            TrainerError: VERL failed, or a loss or gradient is not finite. The weights may have
                changed: load a checkpoint before going on.
        """
        data = to_tensordict(batch, **columns)
        metrics = []
        for number, rows in enumerate(slices):
            num_forward = min(len(rows), micro_batch_size)
            mini_batch = _select(data, rows, batch, num_forward)
            tensordict_utils.assign_non_tensor(
                mini_batch,
                global_batch_size=len(rows),
                micro_batch_size_per_gpu=num_forward,
                update_lr_scheduler=number == len(slices) - 1,
                **settings,
            )
            with translated("update"), _of_a_critic():
                output = self.worker.train_batch(mini_batch)
            metrics.append(
                _step_metrics(tensordict_utils.get(output, "metrics"), number, self._prefix)
            )
        return metrics

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Write model, optimizer, scheduler and RNG states in VERL's format.

        Raises:
            TrainerError: VERL failed.
        """
        with translated("checkpoint"), redirect_stdout(sys.stderr):
            checkpoint.save(self.worker, folder, step)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote; the next steps are as if nothing had happened
        between.

        Raises:
            TrainerError: The checkpoint was written by another number of ranks, a file of it is
                damaged or holds more than values, or VERL failed.
        """
        with translated("checkpoint"), redirect_stdout(sys.stderr):
            checkpoint.load(self.worker, folder)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the current weights by their Hugging Face names."""
        with translated("export"):
            tensors, _ = self.worker.engine.get_per_tensor_param()
            return {name: tensor.detach().cpu() for name, tensor in tensors}


@contextmanager
def _of_a_critic() -> Generator[None]:
    """Pass over torch's warning that a critic's values are a view; VERL changes none in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        yield


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


def _step_metrics(metrics: dict[str, Any], number: int, prefix: str) -> dict[str, float]:
    """Reduce one step's metrics over micro-batches as VERL does, and check that they are finite."""
    reduced = {}
    for name, value in metrics.items():
        if name == "mfu" or name.startswith("perf/"):  # differ from run to run
            continue
        if isinstance(value, list) and isinstance(value[0], Metric):
            reduced[name] = Metric.aggregate_dp(value)
        else:
            reduced[name] = reduce_metrics({name: value})[name]
    named = {name: float(value) for name, value in rename_dict(reduced, prefix).items()}
    for name in (f"{prefix}loss", f"{prefix}grad_norm"):
        if not np.isfinite(named[name]):
            raise TrainerError(f"optimizer step {number}: {name} is {named[name]}")
    return named
