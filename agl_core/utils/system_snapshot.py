"""What a worker says about its machine and process: a flat dict of plain values.

CPU and memory use need psutil, which is optional; without it the keys are left out.
"""

import os
import platform
import shutil
import socket
import subprocess
from typing import Any

from agl_core.errors import ConfigError

_GPU_FIELDS = ("name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu")


def system_snapshot(include_gpu: bool = False) -> dict[str, Any]:
    """Return host, load, memory and disk as they are now.

    Args:
        include_gpu: Whether `nvidia-smi` is asked for the GPUs (some 50 ms or more).

    Raises:
        ConfigError: `include_gpu`, and there is no `nvidia-smi`, or it fails.
    """
    disk = shutil.disk_usage("/")
    snapshot: dict[str, Any] = {
        "host": socket.gethostname(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "pid": os.getpid(),
        "cpu_count": os.cpu_count(),
        "load_1_minute": os.getloadavg()[0],
        "disk_total_bytes": disk.total,
        "disk_used_bytes": disk.used,
    }
    snapshot |= _measured()
    if include_gpu:
        snapshot["gpus"] = _gpus()
    return snapshot


def check_gpu_snapshot() -> None:
    """Check that `system_snapshot(include_gpu=True)` can work here.

    Raises:
        ConfigError: There is no `nvidia-smi`.
    """
    if shutil.which("nvidia-smi") is None:
        raise ConfigError("heartbeat_include_gpu: there is no nvidia-smi here")


def _measured() -> dict[str, Any]:
    try:
        import psutil
    except ImportError:
        return {}
    memory = psutil.virtual_memory()
    return {
        "cpu_percent": psutil.cpu_percent(interval=None),
        "memory_total_bytes": memory.total,
        "memory_used_bytes": memory.used,
        "memory_percent": memory.percent,
        "process_memory_bytes": psutil.Process().memory_info().rss,
    }


def _gpus() -> list[dict[str, Any]]:
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_GPU_FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    check_gpu_snapshot()
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"nvidia-smi failed: {error}") from error
    return [
        {
            "name": name,
            "utilization_percent": _number(used),
            "memory_used_mib": _number(memory_used),
            "memory_total_mib": _number(memory_total),
            "temperature_celsius": _number(temperature),
        }
        for name, used, memory_used, memory_total, temperature in (
            line.split(", ") for line in answer.stdout.splitlines() if line
        )
    ]


def _number(text: str) -> float | None:
    """Return a number, or None where the driver has none ("[N/A]")."""
    try:
        return float(text)
    except ValueError:
        return None
