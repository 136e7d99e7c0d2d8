"""Build VERL's `TrainingWorker` in this process, on one rank.

All workers of the process share one process group. It has an in-memory store, so no port is opened,
and it ends with the last worker.
"""

import gc
import io
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from agl_core.algorithm.verl import platform_cpu
from agl_core.errors import AglError, TrainerError

with platform_cpu.quiet_imports():
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

logger = logging.getLogger(__name__)

# torch warns of its own internal use, once a process, through a handler of its own.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

_FAILURES = (
    AssertionError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    HydraException,
    SafetensorError,
)
"""What VERL and torch raise."""

_num_members = 0
"""Workers of this process that are in its process group."""


def build_training_worker(
    config: DictConfig, model_folder: Path, total_steps: int
) -> TrainingWorker:
    """Join a process group of one rank and build model, optimizer and scheduler.

    Args:
        config: Composed configuration; not changed.
        model_folder: Hugging Face folder of the policy.
        total_steps: Iterations of the run, for the learning-rate schedule.

    Raises:
        TrainerError: VERL cannot build the worker, or this process has a process group of others.
    """
    config = _for_this_machine(config, model_folder, total_steps)
    _join_process_group()
    try:
        with (
            translated("build"),
            _environment(),
            platform_cpu.quiet_imports(),
            _quiet_output(),
        ):
            actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
            worker = TrainingWorker(_worker_config(config, actor_config))
            worker.reset()
            worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    except BaseException:
        leave_process_group()
        raise
    return worker


def _join_process_group() -> None:
    global _num_members
    if not _num_members:
        if dist.is_initialized():
            raise TrainerError("this process has a torch process group already; end it first")
        backend = "cpu:gloo,cuda:nccl" if platform_cpu.HAS_GPU else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] it is documented
        with translated("build"):
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    _num_members += 1


def leave_process_group() -> None:
    """Free what a dropped worker held, and end the process group with the last worker."""
    global _num_members
    gc.collect()
    _num_members -= 1
    if not _num_members:
        dist.destroy_process_group()


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


@contextmanager
def _quiet_output() -> Generator[None]:
    """Keep what VERL prints and draws while it builds off the terminal; it is logged at DEBUG."""
    printed = io.StringIO()
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        if had_bar:
            transformers_logging.enable_progress_bar()
        logger.debug("VERL: %s", printed.getvalue())


@contextmanager
def _environment() -> Generator[None]:
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
def translated(what: str) -> Generator[None]:
    """Turn what VERL and torch raise into a TrainerError."""
    try:
        yield
    except AglError:
        raise
    except _FAILURES as error:
        raise TrainerError(f"VERL {what} failed: {type(error).__name__}: {error}") from error
