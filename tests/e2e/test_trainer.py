"""Every algorithm under every strategy, by the script that a user would write.

Under `prefect`: `tests/deployments/test_strategy.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.lifeline import ChildProcess, spawn
from agl_core.serving.launch import ModelServer
from deployments.server import free_port
from tests.agl_core.execution.processes import wait_until
from tests.conftest import small_run

pytestmark = pytest.mark.slow

CS = {"type": "cs", "n_runners": 2, "server_port": 0}
STRATEGIES = {
    "shm": {"type": "shm", "n_runners": 2, "main_thread": "algorithm"},
    "fork": {**CS, "start_method": "fork"},
    "spawn": {**CS, "start_method": "spawn"},
}
SECONDS = 240.0


def settings_of(engine: ModelServer, folder: Path, algorithm: str, **rest: Any) -> Path:
    model = httpx.get(f"{engine.url}/v1/models").json()["data"][0]["id"]
    verl = small_run(engine.url, "unused").algorithm.config
    path = folder / "settings.json"
    settings = {
        "algorithm": algorithm,
        "engine": engine.url,
        "model": model,
        "ledger": str(folder / "ledger"),
        "verl": verl | {"trainer.total_training_steps": 1, "data.seed": 1},
        **rest,
    }
    path.write_text(json.dumps(settings))
    return path


def command(settings: Path) -> list[str]:
    return [sys.executable, "-m", "tests.e2e.trainer_script", str(settings)]


def check_end(algorithm: str, folder: Path, printed: str) -> None:
    """What a training left is what its algorithm should have done."""
    if algorithm == "verl":
        ledger = open_run(str(folder / "ledger"), "mine")
        (manifest,) = ledger.manifests()
        assert manifest.coverage.trained == 16
        assert verify_run(ledger) == []
        return
    found = json.loads(printed.strip().splitlines()[-1])
    assert len(found["rewards"]) == 8
    assert set(found["rewards"]) <= {0.0, 1.0}
    if algorithm == "baseline":
        assert found["summary"] == {"train": {"succeeded": 8}, "val": {"succeeded": 8}}
    else:
        assert found["statuses"] == ["succeeded"] * 8
        assert found["n"] >= 8


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        ("verl", "shm"),
        ("baseline", "fork"),
        ("own", "shm"),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in (
                ("verl", "fork"),
                ("verl", "spawn"),
                ("baseline", "shm"),
                ("baseline", "spawn"),
                ("own", "fork"),
                ("own", "spawn"),
            )
        ),
    ],
)
def test_the_calculator_is_run(engine, tmp_path: Path, algorithm: str, strategy: str):
    settings = settings_of(engine, tmp_path, algorithm, strategy=STRATEGIES[strategy])
    done = subprocess.run(
        command(settings), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    check_end(algorithm, tmp_path, done.stdout)


@pytest.mark.parametrize(
    "strategy", ["shm", *(pytest.param(name, marks=pytest.mark.long) for name in ("fork", "spawn"))]
)
def test_runners_record_the_calls_of_a_training_themselves(engine, tmp_path: Path, strategy: str):
    settings = settings_of(engine, tmp_path, "verl", strategy=STRATEGIES[strategy], in_runners=True)
    done = subprocess.run(
        command(settings), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    check_end("verl", tmp_path, done.stdout)


def test_a_users_iterative_algorithm_is_run_over_a_store(engine, tmp_path: Path):
    settings = settings_of(engine, tmp_path, "iterative", strategy=STRATEGIES["shm"])
    subprocess.run(command(settings), check=True, capture_output=True, timeout=SECONDS)
    ledger = open_run(str(tmp_path / "ledger"), "mine")
    assert [manifest.coverage.expected for manifest in ledger.manifests()] == [4, 4]
    assert ledger.record().config.algorithm.type == "tests.algorithms:OddRows"
    assert verify_run(ledger) == []


@pytest.mark.parametrize(
    "algorithm", ["verl", *(pytest.param(a, marks=pytest.mark.long) for a in ("baseline", "own"))]
)
def test_algorithm_store_and_runners_are_commands_of_their_own(
    engine, tmp_path: Path, algorithm: str
):
    port = free_port()
    agl = str(Path(sys.executable).with_name("agl"))
    serve = [agl, "store", "--port", str(port), "--path", str(tmp_path / "store.db")]
    settings = settings_of(
        engine,
        tmp_path,
        algorithm,
        strategy={"type": "cs", "n_runners": 2},
        store=f"http://127.0.0.1:{port}",
    )
    env = os.environ | {"AGL_MANAGED_STORE": "0"}
    with spawn(serve, tmp_path / "store.log", env) as store:
        wait_for_port(store, port)
        runner_env = env | {"AGL_CURRENT_ROLE": "runner"}
        with spawn(command(settings), tmp_path / "runners.log", runner_env) as runners:
            done = subprocess.run(
                command(settings),
                env=env | {"AGL_CURRENT_ROLE": "algorithm"},
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            assert done.returncode == 0, done.stderr + runners.log_tail(40)
            below = psutil.Process(runners.pid).children(recursive=True)
    check_end(algorithm, tmp_path, done.stdout)
    wait_until(lambda: not any(process.is_running() for process in below), 30.0)


def wait_for_port(process: ChildProcess, port: int) -> None:
    def is_open() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/v1/agl/health").is_success
        except httpx.TransportError:
            assert process.is_running, process.log_tail(40)
            return False

    wait_until(is_open, 60.0)
