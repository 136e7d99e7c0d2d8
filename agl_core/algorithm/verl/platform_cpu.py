"""VERL on a machine without a GPU, through VERL's extension point for hardware.

Importing this module registers the platform and selects it if torch sees no GPU, which has to
happen before anything imports `verl.workers`. On a GPU machine nothing changes. The VERL engine
for FSDP is registered for "cuda" alone; `ENVIRONMENT` asks for it while tensors stay on the CPU.
"""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quiet_imports() -> Generator[None]:
    """Import VERL, which it goes on doing while a worker is built, without its side effects.

    These are the warnings of what it imports and the configuration of the root logger.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    root.setLevel(level)
    root.handlers[:] = handlers


with quiet_imports():
    from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

HAS_GPU: bool = torch.cuda.is_available()
ENVIRONMENT: dict[str, str] = {} if HAS_GPU else {"VERL_ENGINE_DEVICE": "cuda"}
"""Variables that VERL reads when it builds a worker."""


class _CpuModule:
    """Answers for `torch.cuda` where VERL asks its device module for names and memory."""

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if "memory" in name:
            return lambda *_, **__: 0
        return getattr(torch.cpu, name, lambda *_, **__: None)


class CpuPlatform(PlatformBase):
    """One CPU "device" with gloo collectives; memory and profiling calls do nothing."""

    @property
    def device_name(self) -> str:
        """The name of torch's device."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """The same, for want of a vendor."""
        return "cpu"

    @property
    def device_module(self) -> Any:
        """What stands for `torch.cuda`."""
        return _CpuModule()

    def is_available(self) -> bool:
        """Return True."""
        return True

    def current_device(self) -> Any:
        """Return the torch device that stands for the CPU."""
        return "cpu"

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: CPU work is synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """Return no capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that VERL clears and sets; without a GPU it has no effect."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(  # pyright: ignore[reportIncompatibleMethodOverride] VERL declares no type
        self, msg: str
    ) -> Generator[None]:
        """Do nothing around a block."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return Ray's name of the resource."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return none."""
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """Return one CPU where VERL would take one GPU."""
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        """Return False."""
        return False

    def cudart(self) -> None:
        """Return nothing: there is no CUDA runtime."""


PlatformRegistry.register(platform="cpu")(CpuPlatform)
if not HAS_GPU:
    set_platform(CpuPlatform())
