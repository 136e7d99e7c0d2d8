"""Prefect servers and workers that may be killed at any time."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

from agl_core.lifeline import spawn
from deployments.server import prefect_server


def find_children(*words: str) -> list[psutil.Process]:
    """Return the processes below this one whose command line has these words, but no guards."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if all(word in line for word in words) and "lifeline" not in line:
            found.append(process)
    return found


def kill(processes: list[psutil.Process]) -> int:
    """SIGKILL them; return how many there were."""
    killed = 0
    for process in processes:
        try:
            process.kill()
            killed += 1
        except psutil.NoSuchProcess:
            continue
    return killed


class MortalServer:
    """A Prefect server on a port of its own, whose database outlives it."""

    def __init__(self, home: Path, port: int) -> None:
        self._home = home
        self._port = port
        self._running = ExitStack()
        self.url = ""

    def start(self) -> None:
        """Start it, again after a kill, and return once it answers."""
        self.url = self._running.enter_context(prefect_server(self._home, self._port))

    def kill(self) -> None:
        """SIGKILL it."""
        assert kill(find_children("server", str(self._port))), "no server runs"
        self._running.close()

    def close(self) -> None:
        self._running.close()


class MortalPool:
    """The project's deployments on a process pool, and its one worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefect = str(Path(sys.executable).with_name("prefect"))
        self._worker = ExitStack()

    def deploy(self) -> None:
        """Create the pool and deploy the flows."""
        create = ["work-pool", "create", "agl", "--type", "process", "--overwrite"]
        for arguments in (create, ["deploy", "--all"]):
            command = [self._prefect, "--no-prompt", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

    def start_worker(self, timeout_seconds: float = 120.0) -> None:
        """Start the worker, again after a kill; return once the server knows of one."""
        command = [self._prefect, "worker", "start", "--pool", "agl", "--type", "process"]
        env = {**os.environ, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        self._worker.enter_context(spawn(command, self._folder / "worker.log", env))
        workers = f"{os.environ['PREFECT_API_URL']}/work_pools/agl/workers/filter"
        deadline = time.monotonic() + timeout_seconds
        while not any(w["status"] == "ONLINE" for w in httpx.post(workers, json={}).json()):
            assert time.monotonic() < deadline, "the worker does not poll"
            time.sleep(0.2)

    def kill_worker(self) -> int:
        """SIGKILL the worker; return the number of its processes."""
        killed = kill(find_children("worker", "start", "agl"))
        self._worker.close()
        return killed

    def kill_shard(self, timeout_seconds: float = 60.0) -> int:
        """SIGKILL the first process that runs a shard, once there is one."""
        deadline = time.monotonic() + timeout_seconds
        while not (shards := find_children("prefect", "engine")):
            if time.monotonic() > deadline:
                return 0
            time.sleep(0.05)
        return kill(shards[:1])

    def close(self) -> None:
        self._worker.close()
