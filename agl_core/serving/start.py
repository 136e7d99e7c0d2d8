"""Starts the processes that serve a run's policy, and waits until they answer."""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from agl_core.config import ServingSettings
from agl_core.errors import UpstreamError
from agl_core.lifeline import ChildProcess, spawn
from agl_core.serving.vllm.command import vllm_command
from agl_core.types.training import PolicyRef


class Started(NamedTuple):
    """A server that answers."""

    url: str
    """Base URL without `/v1`."""
    process: ChildProcess


def start_engine(
    settings: ServingSettings, policy: PolicyRef, private: Path, log: Path, token: Path | None
) -> Started:
    """Start the embedded engine.

    Args:
        settings: Where and how to serve.
        policy: What it serves first; it has a local path.
        private: Folder for files that only this run may read.
        log: Gets its output.
        token: File with the token to ask for; None for none.

    Raises:
        UpstreamError: It ended or did not answer in time; the message holds the end of its log.
    """
    assert policy.path is not None, "a server starts from a policy on this machine's disk"
    address = private / "address"
    command = [sys.executable, "-m", "agl_core.serving.engine_main"]
    command += ["--model", policy.path, "--version", policy.version, "--port", "0"]
    command += ["--address-file", str(address), "--threads", str(settings.threads)]
    command += ["--max-batch-size", str(settings.max_batch_size), "--host", settings.host]
    command += ["--device", settings.device]
    if token is not None:
        command += ["--token-file", str(token)]
    process = spawn(command, log)
    _wait("the model engine", process, address.exists, settings.startup_timeout_seconds)
    return Started(address.read_text().strip(), process)


def start_vllm(
    settings: ServingSettings, policy: PolicyRef, private: Path, log: Path, token: Path | None
) -> Started:
    """Start vLLM; see `start_engine`."""
    assert settings.vllm is not None, "the settings name a vLLM"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.create_server((settings.host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
    command = vllm_command(
        settings.vllm, policy, private, settings.host, port, token, dict(os.environ)
    )
    process = spawn(command.arguments, log, command.env)
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{name}:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success
        except httpx.TransportError:  # it does not listen yet
            return False

    _wait("vLLM", process, answers, settings.startup_timeout_seconds)
    return Started(url, process)


def _wait(
    what: str, process: ChildProcess, is_ready: Callable[[], bool], timeout_seconds: float
) -> None:
    """Return once a process is ready; end it where it is not in time."""
    deadline = time.monotonic() + timeout_seconds
    while not is_ready():
        is_running = process.is_running
        if not is_running or time.monotonic() > deadline:
            process.stop()
            reason = (
                f"it did not answer within {timeout_seconds:g} s (serving.startup_timeout_seconds)"
                if is_running
                else "it ended"
            )
            raise UpstreamError(f"{what} did not start: {reason}\n{process.log_tail()}")
        time.sleep(0.05)
