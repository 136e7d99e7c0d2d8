"""Build VERL's `TrainingWorker` in this process, on one rank, for each model of an update.

All workers of the process share one process group. It has an in-memory store, so no port is opened,
and it ends with the last worker.
"""

import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from agl_core.algorithm.verl import platform_cpu
from agl_core.algorithm.verl.value_head import value_head
from agl_core.errors import AglError, TrainerError

with platform_cpu.quiet_imports():
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import EngineConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss, value_loss

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


def build_actor(config: DictConfig, folder: Path, total_steps: int) -> TrainingWorker:
    """Join a process group of one rank and build the policy with its optimizer and schedule.

    Args:
        config: Composed configuration; not changed.
        folder: Hugging Face folder of the policy.
        total_steps: Iterations of the run, for the learning-rate schedule.

    Raises:
        TrainerError: VERL cannot build the worker, or this process has a process group of others.
    """
    config = _for_this_machine(config, total_steps)

    def build() -> TrainingWorker:
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        actor.model_config = _model(config.actor_rollout_ref.model, folder)
        if config.algorithm.rollout_correction.bypass_mode:  # as `apply_bypass_mode` does
            loss = replace(
                actor.policy_loss,
                loss_mode="bypass_mode",
                rollout_correction=RolloutCorrectionConfig(**config.algorithm.rollout_correction),
            )
            object.__setattr__(actor, "policy_loss", loss)
        rollout = config.actor_rollout_ref.rollout
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=actor.model_config,
                engine_config=_with_micro_batches(
                    actor.engine,
                    actor.ppo_micro_batch_size_per_gpu,
                    rollout.log_prob_micro_batch_size_per_gpu,
                ),
                optimizer_config=actor.optim,
                checkpoint_config=actor.checkpoint,
            )
        )
        worker.reset()
        worker.set_loss_fn(partial(ppo_loss, config=actor))
        return worker

    return _build(build)


def build_reference(config: DictConfig, folder: Path) -> TrainingWorker:
    """Build a frozen policy, which only gives log-probs.

    Args:
        config: Composed configuration; not changed.
        folder: Hugging Face folder of the policy.

    Raises:
        TrainerError: As `build_actor`.
    """
    config = _for_this_machine(config, total_steps=1)

    def build() -> TrainingWorker:
        reference = config.actor_rollout_ref.ref
        micro_batch_size = reference.log_prob_micro_batch_size_per_gpu
        engine = omega_conf_to_dataclass(reference.fsdp_config)
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=_model(config.actor_rollout_ref.model, folder),
                engine_config=_with_micro_batches(engine, micro_batch_size, micro_batch_size),
                optimizer_config=actor.optim,
                checkpoint_config=actor.checkpoint,
            )
        )
        worker.reset()
        return worker

    return _build(build)


def build_critic(config: DictConfig, folder: Path, total_steps: int, seed: int) -> TrainingWorker:
    """Build a model of token values with its optimizer and schedule.

    Args:
        config: Composed configuration; not changed.
        folder: Hugging Face folder of a language model; its output layer is replaced.
        total_steps: Iterations of the run, for the learning-rate schedule.
        seed: Decides the weights of the new output layer.

    Raises:
        TrainerError: As `build_actor`.
    """
    config = _for_this_machine(config, total_steps)

    def build() -> TrainingWorker:
        config.critic.model.path = str(folder)
        critic = omega_conf_to_dataclass(config.critic)
        with value_head(seed):
            worker = TrainingWorker(
                TrainingWorkerConfig(
                    model_type="value_model",
                    model_config=critic.model,
                    engine_config=_with_micro_batches(
                        critic.engine,
                        critic.ppo_micro_batch_size_per_gpu,
                        critic.forward_micro_batch_size_per_gpu,
                    ),
                    optimizer_config=critic.optim,
                    checkpoint_config=critic.checkpoint,
                )
            )
            worker.reset()
        worker.set_loss_fn(partial(value_loss, config=critic))
        return worker

    return _build(build)


def _build(build: Callable[[], TrainingWorker]) -> TrainingWorker:
    _join_process_group()
    try:
        with (
            translated("build"),
            _environment(),
            platform_cpu.quiet_imports(),
            _quiet_output(),
        ):
            return build()
    except BaseException:
        leave_process_group()
        raise


def _model(config: DictConfig, folder: Path) -> HFModelConfig:
    config = config.copy()
    config.path = str(folder)
    return omega_conf_to_dataclass(config)


def _with_micro_batches(engine: EngineConfig, train: int, infer: int) -> EngineConfig:
    engine.use_dynamic_bsz = False
    engine.micro_batch_size_per_gpu = train
    engine.infer_micro_batch_size_per_gpu = infer
    return engine


def _join_process_group() -> None:
    global _num_members
    if not _num_members:
        if dist.is_initialized():
            raise TrainerError("this process has a torch process group already; end it first")
        backend = "cpu:gloo,cuda:nccl" if platform_cpu.HAS_GPU else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] it is documented
        hook = sys.excepthook
        with translated("build"):
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        sys.excepthook = hook  # torch's wraps it each time, to say which of one rank it was
    _num_members += 1


def leave_process_group() -> None:
    """Free what a dropped worker held, and end the process group with the last worker."""
    global _num_members
    gc.collect()
    _num_members -= 1
    if not _num_members:
        dist.destroy_process_group()


def _for_this_machine(config: DictConfig, total_steps: int) -> DictConfig:
    """Return a copy of the configuration with what the run and the machine decide."""
    config = config.copy()
    settings: dict[str, Any] = {
        "actor_rollout_ref.actor.optim.total_training_steps": total_steps,
        "actor_rollout_ref.ref.fsdp_config.strategy": config.actor_rollout_ref.actor.strategy,
        "critic.optim.total_training_steps": total_steps,
    }
    if not platform_cpu.HAS_GPU:
        for model in ("actor_rollout_ref.model", "critic.model"):
            settings |= {
                f"{model}.use_remove_padding": False,
                f"{model}.enable_gradient_checkpointing": False,
                f"{model}.override_config.attn_implementation": "sdpa",
            }
        for engine in (
            "actor_rollout_ref.actor.fsdp_config",
            "actor_rollout_ref.ref.fsdp_config",
            "critic.fsdp",
        ):
            settings |= {
                f"{engine}.strategy": "fsdp2",
                f"{engine}.use_torch_compile": False,
                # one that is only used forward would be kept in pinned memory, which needs a GPU
                f"{engine}.forward_only": False,
                f"{engine}.mixed_precision": dict.fromkeys(
                    ("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"
                ),
            }
        settings |= {
            "actor_rollout_ref.actor.strategy": "fsdp2",
            "actor_rollout_ref.actor.use_torch_compile": False,
            "critic.strategy": "fsdp2",
        }
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


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
