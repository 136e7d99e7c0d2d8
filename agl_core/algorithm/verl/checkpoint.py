"""Checkpoints in VERL's format: VERL writes them, and they are read here without running what they
hold.

VERL's own reader unpickles (`torch.load(weights_only=False)`), so that whoever may write to the
ledger could run code here. This one reads tensors, numbers, text and containers of them only.
"""

import pickle
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.errors import TrainerError

with quiet_imports():
    from torch.distributed.fsdp import (
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )
    from verl.utils.fsdp_utils import get_fsdp_state_ctx

_ARRAY: Any = cast(tuple[Any, ...], np.random.get_state(legacy=True))[1]
_SAFE_GLOBALS: list[Any] = [
    _ARRAY.__reduce__()[0],
    (_ARRAY.__reduce__()[0], "numpy.core.multiarray._reconstruct"),  # as numpy 1 names it
    np.ndarray,
    np.dtype,
    type(_ARRAY.dtype),
]
"""What numpy's RNG state is made of: an array of uint32."""


def save(worker: Any, folder: Path, step: int) -> None:
    """Write a worker's model, optimizer, schedule and RNG states; VERL's lock files are removed.

    VERL locks the folders that it makes by files in the temporary folder, and leaves them.
    """
    folder = folder.absolute()
    worker.save_checkpoint(str(folder), global_step=step)
    for made in (folder, folder / "huggingface"):
        name = f"ckpt_{hash(str(made)) & 0xFFFFFFFF:08x}.lock"
        Path(tempfile.gettempdir(), name).unlink(missing_ok=True)


def load(worker: Any, folder: Path) -> None:
    """Restore what `save` wrote.

    Raises:
        TrainerError: The checkpoint was written by another number of ranks, or a file of it is
            damaged or holds more than values.
    """
    if not part(folder, "model").is_file():
        raise TrainerError(f"{folder} holds no checkpoint of one rank")
    # The engine brings the model to its device and away again around this call.
    manager = worker.engine.checkpoint_manager
    manager.load_checkpoint = partial(_restore, manager, folder)
    try:
        worker.load_checkpoint(str(folder), del_local_after_load=False)
    finally:
        del manager.load_checkpoint


def part(folder: Path, name: str) -> Path:
    """Return the file of one part, `model`, `optim` or `extra_state`, as one rank writes it."""
    return folder / f"{name}_world_size_1_rank_0.pt"


def read(path: Path) -> Any:
    """Return the values in a file of a checkpoint; nothing in it is run.

    Raises:
        TrainerError: The file is missing or damaged, or holds more than values.
    """
    try:
        with torch.serialization.safe_globals(_SAFE_GLOBALS), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about a file that is refused then
            return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise TrainerError(
            f"checkpoint file {path}: not loaded, since it holds more than tensors and numbers, "
            "or is damaged; this program writes no such file, so find out who changed it, and "
            "restore it or start another run"
        ) from error
    except Exception as error:  # what a damaged file raises is not documented
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise TrainerError(f"checkpoint file {path}: cannot be read: {why}") from error


def _restore(manager: Any, folder: Path, **_: Any) -> None:
    """Do what the manager's own `load_checkpoint` does, each file being read before the first is
    used.
    """
    model = read(part(folder, "model"))
    optimizer = read(part(folder, "optim"))
    extra = read(part(folder, "extra_state"))
    on_gpu = torch.cuda.is_available()
    with get_fsdp_state_ctx(
        manager.model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=on_gpu),
        ShardedOptimStateDictConfig(offload_to_cpu=on_gpu),
    ):
        manager.model.load_state_dict(model)
        manager.optimizer.load_state_dict(optimizer)
    manager.load_rng_state(extra["rng"])
    if extra["lr_scheduler"] is not None and manager.lr_scheduler is not None:
        manager.lr_scheduler.load_state_dict(extra["lr_scheduler"])
