"""The trainer: an algorithm, an agent and runners, put together and run without Prefect."""

from agl_core.trainer.init_utils import build_component
from agl_core.trainer.registry import ExecutionStrategyRegistry
from agl_core.trainer.trainer import Trainer

__all__ = ["ExecutionStrategyRegistry", "Trainer", "build_component"]
