"""What is left, and what is lost, when a process of a run is killed or interrupted."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_core.emitter import find_final_reward
from agl_core.store import SqliteLightningStore
from deployments.server import free_port
from tests.agl_core.execution.processes import (
    all_gone,
    children,
    dawdling,
    descendants,
    script,
    started,
    wait_until,
)

CS = {
    "type": "cs",
    "server_port": 0,
    "n_runners": 2,
    "graceful_timeout": 2.0,
    "terminate_timeout": 5.0,
}


def dawdle(folder: Path) -> dict[str, Any]:
    """Return a run that goes on until it is ended."""
    folder.mkdir()
    rows = [{"number": n, "folder": str(folder)} for n in range(2)]
    return {"algorithm": "waits", "agent": "dawdles", "rows": rows}


@pytest.mark.parametrize(
    ("method", "number", "status"),
    [
        ("fork", signal.SIGINT, -signal.SIGINT),
        ("spawn", signal.SIGINT, -signal.SIGINT),
        ("fork", signal.SIGTERM, 128 + signal.SIGTERM),
        ("fork", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_script_that_is_ended_leaves_no_process_behind(
    method: str, number: signal.Signals, status: int, tmp_path: Path
):
    strategy = CS | {"start_method": method}
    run = dawdle(tmp_path / "dawdling")
    with script(tmp_path / "log", strategy=strategy, **run) as process:
        pairs = wait_until(lambda: len(found := dawdling(tmp_path / "dawdling")) == 2 and found)
        below = descendants(process.pid)
        assert {pid for pair in pairs for pid in pair} < set(below)
        os.kill(process.pid, number)
        assert process.wait(60) == status
        assert wait_until(lambda: all_gone(below), 30)


def test_a_script_with_threads_ends_with_ctrl_c(tmp_path: Path):
    strategy = {"type": "shm", "n_runners": 2, "graceful_delay": 1.0}
    run = dawdle(tmp_path / "dawdling")
    with script(tmp_path / "log", strategy=strategy, **run) as process:
        wait_until(lambda: len(dawdling(tmp_path / "dawdling")) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
        started = [child for _, child in dawdling(tmp_path / "dawdling")]
        assert wait_until(lambda: all_gone(started), 30), "what agents started ends with the script"


def test_runners_end_where_their_supervisor_is_killed(tmp_path: Path):
    run = dawdle(tmp_path / "dawdling")
    with script(tmp_path / "log", strategy=CS, **run) as process:
        wait_until(lambda: len(dawdling(tmp_path / "dawdling")) == 2)
        below = descendants(process.pid)
        (supervisor,) = children(process.pid)
        os.kill(supervisor, signal.SIGKILL)
        assert process.wait(60) == 1
        assert wait_until(lambda: all_gone(below), 30)
    assert "the runners' supervisor ended with exit code -9" in (tmp_path / "log").read_text()


class Parts:
    """A run whose store, runners and algorithm are commands of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.path = folder / "store.db"
        self.dawdling = folder / "dawdling"
        self.dawdling.mkdir()
        self.env = {"AGL_SERVER_PORT": str(self.port)}

    def store(self) -> Any:
        command = [sys.executable, "-c", "from deployments.cli import main; main()", "store"]
        options = ["--path", str(self.path), "--port", str(self.port)]
        return started([*command, *options], self.folder / "store.log")

    def runners(self) -> Any:
        return script(
            self.folder / "runners.log",
            self.env | {"AGL_CURRENT_ROLE": "runner"},
            strategy={k: v for k, v in CS.items() if k != "server_port"},
            agent="dawdles",
        )

    def algorithm(self, num_dawdling: int = 0) -> Any:
        rows = [
            {"number": n, "folder": str(self.dawdling) if n < num_dawdling else ""}
            for n in range(8)
        ]
        return script(
            self.folder / "algorithm.log",
            self.env | {"AGL_CURRENT_ROLE": "algorithm", "AGL_MANAGED_STORE": "0"},
            strategy={"type": "cs"},
            agent="dawdles",
            algorithm="enqueues",
            rows=rows,
            store=f"http://127.0.0.1:{self.port}",
        )

    def rewards(self) -> list[float | None] | None:
        """Return the rewards once all rollouts have succeeded."""
        return asyncio.run(self._rewards())

    async def _rewards(self) -> list[float | None] | None:
        store = SqliteLightningStore(self.path)
        try:
            rollouts = await store.query_rollouts()
            if len(rollouts) < 8 or {one.status for one in rollouts} != {"succeeded"}:
                return None
            return [
                find_final_reward(await store.query_spans(one.rollout_id, "latest"))
                for one in rollouts
            ]
        finally:
            await store.close()


ALL = [float(number) for number in range(8)]


@pytest.mark.slow
def test_parts_meet_in_a_store_that_is_killed_and_started_again(tmp_path: Path):
    parts = Parts(tmp_path)
    with parts.runners() as runners, parts.algorithm(num_dawdling=2) as algorithm:
        with parts.store() as store:  # both waited for it
            wait_until(lambda: len(dawdling(parts.dawdling)) == 2)
            store.kill()
        with parts.store():
            for pid, _ in dawdling(parts.dawdling):  # and the runners too: nothing is lost
                os.kill(pid, signal.SIGKILL)
            assert algorithm.wait(90) == 0
            assert parts.rewards() == ALL
            below = descendants(runners.pid)
            assert len(below) == 2
            runners.send_signal(signal.SIGINT)
            assert runners.wait(60) == -signal.SIGINT
            assert wait_until(lambda: all_gone(below), 30)


@pytest.mark.slow
def test_runners_go_on_where_the_algorithm_is_killed(tmp_path: Path):
    parts = Parts(tmp_path)
    with parts.store(), parts.runners(), parts.algorithm(num_dawdling=1) as algorithm:
        wait_until(lambda: len(dawdling(parts.dawdling)) == 1)
        algorithm.kill()
        algorithm.wait()
        os.kill(dawdling(parts.dawdling)[0][0], signal.SIGKILL)
        assert wait_until(parts.rewards, 60) == ALL
        with parts.algorithm() as again:
            assert again.wait(60) == 0
