"""One VERL `TrainingWorker` in this process: log-probs, optimizer steps, checkpoints, export.

The worker joins a process group of one rank over an in-memory store, so no port is opened, and
leaves it on `close`; one worker can live in a process at a time, and another may follow it.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agl_core.algorithm.verl import platform_cpu
from agl_core.algorithm.verl.batch import RowBatch, jagged, to_tensordict
from agl_core.errors import AglError, TrainerError

with platform_cpu.quiet_imports():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


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
        if dist.is_initialized():
            raise TrainerError("this process has a torch process group already; close it first")
        self._config = _for_this_machine(config, model_folder, total_steps)
        self._model_folder = model_folder
        actor = self._config.actor_rollout_ref.actor
        self._micro_batch_size: int = actor.ppo_micro_batch_size_per_gpu
        self._infer_micro_batch_size: int = (
            self._config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        )
        try:
            with (
                _translated("build"),
                _environment(),
                platform_cpu.quiet_imports(),
                redirect_stdout(sys.stderr),
            ):
                backend = "cpu:gloo,cuda:nccl" if platform_cpu.HAS_GPU else "gloo"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
                actor_config = omega_conf_to_dataclass(actor)
                self._worker = TrainingWorker(_worker_config(self._config, actor_config))
                self._worker.reset()
                self._worker.set_loss_fn(partial(ppo_loss, config=actor_config))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the model and leave the process group; the object cannot be used afterwards."""
        self.__dict__.pop("_worker", None)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def log_probs(self, batch: RowBatch, temperature: float) -> LogProbs:
        """Return the log-prob of each response token under the current weights.

        Args:
            batch: The rows.
            temperature: Logits are divided by it, as they were in sampling.

        Raises:
            TrainerError: VERL failed, or a log-prob is not finite.
        """
        data = _select(
            to_tensordict(batch), np.arange(len(batch)), batch, self._infer_micro_batch_size
        )
        tensordict_utils.assign_non_tensor(
            data,
            temperature=temperature,
            calculate_entropy=True,
            compute_loss=False,
            micro_batch_size_per_gpu=min(len(batch), self._infer_micro_batch_size),
        )
        with _translated("log-prob pass"):
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
            mini_data = _select(data, mini_batch, batch, self._micro_batch_size)
            tensordict_utils.assign_non_tensor(
                mini_data,
                temperature=self._config.actor_rollout_ref.rollout.temperature,
                calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
                global_batch_size=len(mini_batch),
                micro_batch_size_per_gpu=min(len(mini_batch), self._micro_batch_size),
                update_lr_scheduler=number == len(slices) - 1,
            )
            with _translated("update"):
                output = self._worker.train_batch(mini_data)
            metrics.append(_step_metrics(tensordict_utils.get(output, "metrics"), number))
        return metrics

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Write model, optimizer, scheduler and RNG states in VERL's format.

        Raises:
            TrainerError: VERL failed.
        """
        with _translated("checkpoint"), redirect_stdout(sys.stderr):
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
        with _translated("checkpoint"), redirect_stdout(sys.stderr):
            self._worker.load_checkpoint(str(folder), del_local_after_load=False)

    def export(self, folder: Path) -> None:
        """Write the current weights as an ordinary Hugging Face folder.

        The folder mirrors the one that the worker was built from: same files, same tensors in
        each, same dtypes, new values. So configuration, tokenizer and chat template are kept byte
        by byte, and unchanged weights give equal files.

        Args:
            folder: An existing empty folder.

        Raises:
            TrainerError: The model folder has no safetensors, or a tensor that the model lacks.
        """
        sources = sorted(self._model_folder.glob("*.safetensors"))
        if not sources:
            raise TrainerError(f"{self._model_folder} holds no safetensors")
        with _translated("export"):
            tensors, _ = self._worker.engine.get_per_tensor_param()
            weights = {name: tensor.detach().cpu() for name, tensor in tensors}
            for source in sources:
                _write_like(source, folder / source.name, weights)
        for path in self._model_folder.iterdir():
            if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES:
                (folder / path.name).write_bytes(path.read_bytes())


def _for_this_machine(config: DictConfig, model_folder: Path, total_steps: int) -> DictConfig:
    """Return a copy of the configuration with what the run, not the user, decides."""
    config = config.copy()
    settings: dict[str, Any] = {
        "model.path": str(model_folder),
        "actor.optim.total_training_steps": total_steps,
    }
    if not platform_cpu.HAS_GPU:
        settings |= {
            "model.use_remove_padding": False,
            "model.enable_gradient_checkpointing": False,
            "model.override_config.attn_implementation": "sdpa",
            "actor.strategy": "fsdp2",
            "actor.use_torch_compile": False,
            "actor.fsdp_config.use_torch_compile": False,
            "actor.fsdp_config.mixed_precision": dict.fromkeys(
                ("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"
            ),
        }
    for key, value in settings.items():
        OmegaConf.update(config, f"actor_rollout_ref.{key}", value, force_add=True)
    return config


def _worker_config(config: DictConfig, actor_config: Any) -> TrainingWorkerConfig:
    """Build the worker's configuration as VERL's `ActorRolloutRefWorker.init_model` does."""
    engine = actor_config.engine
    engine.use_dynamic_bsz = False
    engine.micro_batch_size_per_gpu = actor_config.ppo_micro_batch_size_per_gpu
    engine.infer_micro_batch_size_per_gpu = (
        config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
    )
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    actor_config.model_config = model_config
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=model_config,
        engine_config=engine,
        optimizer_config=actor_config.optim,
        checkpoint_config=actor_config.checkpoint,
    )


def _select(
    data: TensorDict, rows: np.ndarray, batch: RowBatch, micro_batch_size: int
) -> TensorDict:
    """Return some rows, filled up to full micro-batches by short rows of no loss weight.

    VERL refuses a mini-batch that its micro-batches do not divide.
    """
    num_fillers = -len(rows) % min(micro_batch_size, len(rows))
    shortest = rows[np.argmin((batch.prompt_lengths + batch.response_lengths)[rows])]
    indices = np.concatenate([rows, np.full(num_fillers, shortest)])
    selected = tensordict_utils.index_select_tensor_dict(data, torch.from_numpy(indices))
    if num_fillers:
        lengths = batch.response_lengths[indices]
        values = selected["response_mask"].values().clone()
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


def _write_like(source: Path, target: Path, weights: dict[str, torch.Tensor]) -> None:
    with safe_open(source, framework="pt") as layout:
        names, metadata = list(layout.keys()), layout.metadata()
        dtypes = {name: layout.get_tensor(name).dtype for name in names}
    missing = [name for name in names if name not in weights]
    if missing:
        raise TrainerError(f"{source.name}: the model has no tensor {missing[0]!r}")
    save_file({n: weights[n].to(dtypes[n]).contiguous() for n in names}, target, metadata)


@contextmanager
def _environment() -> Iterator[None]:
    """Set what VERL's worker reads from, and writes to, the environment; restore it after."""
    before = dict(os.environ)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    unused = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    try:
        os.environ.update(rank | unused | platform_cpu.ENVIRONMENT)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn what VERL and torch raise into a TrainerError."""
    try:
        yield
    except AglError:
        raise
    except (RuntimeError, ValueError, KeyError, AssertionError, OSError, SafetensorError) as error:
        raise TrainerError(f"VERL {what} failed: {type(error).__name__}: {error}") from error
