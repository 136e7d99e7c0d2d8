"""Processes of the tests: started as a user would, looked at by id."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first true value of the condition."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"not within {seconds} s: {condition}"
        time.sleep(0.05)
    return found


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[int]:
    """Return all processes below one."""
    return _ours(psutil.Process(pid).children(recursive=True))


def children(pid: int) -> list[int]:
    """Return the processes directly below one."""
    return _ours(psutil.Process(pid).children())


def _ours(processes: list[psutil.Process]) -> list[int]:
    """Leave out those that multiprocessing has for itself."""
    found: list[int] = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "resource_tracker" not in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


def all_gone(pids: list[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def dawdling(folder: Path) -> list[tuple[int, int]]:
    """Return the runners' processes that dawdle, each with the process that its agent started."""
    return [(int(a), int(b)) for a, b in (one.name.split("-") for one in folder.iterdir())]


@contextmanager
def script(
    log: Path, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the script; whatever is left of it at the end is killed."""
    command = [sys.executable, "-m", "tests.agl_core.execution.script", json.dumps(options)]
    with started(command, log, env) as process:
        yield process


@contextmanager
def started(
    command: list[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | dict(env or {})
        )
    below: list[int] = []
    try:
        yield process
        below = descendants(process.pid) if process.poll() is None else []
    finally:
        for pid in [process.pid, *below]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
