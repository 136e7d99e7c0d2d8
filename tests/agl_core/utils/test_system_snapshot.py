import builtins

import pytest

from agl_core.errors import ConfigError
from agl_core.utils.system_snapshot import system_snapshot


def test_the_snapshot_says_where_and_how_busy():
    snapshot = system_snapshot()
    assert snapshot["cpu_count"] >= 1
    assert 0 <= snapshot["disk_used_bytes"] <= snapshot["disk_total_bytes"]
    assert snapshot["process_memory_bytes"] > 0
    assert "gpus" not in snapshot


def test_gpus_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA X, 12, 345, 8192, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert system_snapshot(include_gpu=True)["gpus"] == [
        {
            "name": "NVIDIA X",
            "utilization_percent": 12.0,
            "memory_used_mib": 345.0,
            "memory_total_mib": 8192.0,
            "temperature_celsius": None,
        }
    ]
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ConfigError, match="nvidia-smi failed"):
        system_snapshot(include_gpu=True)


def test_what_needs_psutil_is_left_out_without_it(monkeypatch):
    real = builtins.__import__

    def without_psutil(name, *args, **kwargs):
        if name == "psutil":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_psutil)
    snapshot = system_snapshot()
    assert "host" in snapshot
    assert "cpu_percent" not in snapshot
