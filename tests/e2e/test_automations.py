"""What the installed automations do after SIGKILL: mark, restart, and at some point leave it."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.verify import verify_run
from agl_core.lifeline import ChildProcess
from agl_core.serving.launch import ModelServer
from deployments.cli import app
from tests.conftest import small_run
from tests.e2e.deployed import Api, start_worker

pytestmark = pytest.mark.slow

HEARTBEAT_SECONDS = 30
"""The shortest that Prefect allows."""
POOL = "automated"
DEPLOYMENT = "training-run/training-run"


@pytest.fixture(scope="module")
def api(prefect_api: str) -> Iterator[Api]:
    with Api(prefect_api) as client:
        yield client


@pytest.fixture(scope="module")
def worker(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildProcess]:
    """The project deployed by `agl deploy`, with a worker; the automations go with it."""
    arguments = ["deploy", "--pool", POOL, "--heartbeat", str(HEARTBEAT_SECONDS)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    automations = api.post("/automations/filter")
    for automation in automations:
        if automation["name"] == "agl-killed-flow-runs":  # two missed heartbeats, not three
            automation["trigger"]["within"] = 2 * HEARTBEAT_SECONDS + 5
            body = {key: automation[key] for key in ("name", "enabled", "trigger", "actions")}
            path = f"{api.url}/automations/{automation['id']}"
            httpx.put(path, json=body).raise_for_status()
    prefect = Path(sys.executable).with_name("prefect")
    env = os.environ | {"PYTHONPATH": str(Path.cwd())}
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with start_worker(prefect, log, env, POOL) as process:
        yield process
    api.remove_automations()


def wait_for(what: str, look: Callable[[], Any], seconds: float = 240.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.25)
    return found


def starts(api: Api, run_id: str) -> list[dict[str, Any]]:
    """The flow runs of `training-run` that carried a run on, oldest first."""
    found = api.post(
        "/flow_runs/filter",
        sort="EXPECTED_START_TIME_ASC",
        flows={"name": {"any_": ["training-run"]}},
    )
    return [run for run in found if run["parameters"]["config"]["run_id"] == run_id]


def parameters(config: Any, **verl: Any) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    values["algorithm"]["config"] |= {"trainer.total_training_steps": 1, **verl}
    return {"config": values}


@dataclass(frozen=True, slots=True)
class Killed:
    """A deployed training run whose process was killed amid its rollouts."""

    flow_run_id: str
    ledger: RunLedger


@pytest.fixture(scope="module")
def killed(
    engine: ModelServer, tmp_path_factory: pytest.TempPathFactory, api: Api, worker: ChildProcess
) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    config = small_run(engine.url, str(folder), run_id="killed", val_data=None)
    flow_run_id = api.start(DEPLOYMENT, parameters(config))
    claims = folder / "runs/killed/iterations/000000/rollouts/train/claims"
    wait_for("the first claim", lambda: claims.is_dir() and list(claims.glob("*.json")))
    ledger = open_run(str(folder), "killed")
    start = ledger.starts.latest()
    assert start is not None
    os.kill(start.pid, signal.SIGKILL)
    return Killed(flow_run_id, ledger)


def test_a_killed_training_run_is_started_again_and_completes(
    killed: Killed, api: Api, worker: ChildProcess
):
    first = api.ended(killed.flow_run_id)
    assert first["state_type"] == "CRASHED"
    again = wait_for("a second start", lambda: starts(api, "killed")[1:])[0]
    assert again["parameters"]["automatic"] is True
    assert again["parameters"]["config"] == first["parameters"]["config"]
    assert again["created_by"]["display_value"] == "agl-restart-training-runs"
    ended = api.ended(again["id"])
    assert ended["state_type"] == "COMPLETED", f"{ended['state']}\n{worker.log_tail(40)}"
    assert killed.ledger.committed() == 1
    assert verify_run(killed.ledger) == []
    assert [record.automatic for record in killed.ledger.starts.all()] == [False, True]


@pytest.mark.long
def test_a_run_that_kills_its_process_each_time_is_not_started_for_ever(
    engine: ModelServer, tmp_path: Path, api: Api, worker: ChildProcess
):
    config = small_run(
        engine.url,
        str(tmp_path),
        run_id="deadly",
        val_data=None,
        agent="tests.e2e.deadly_agent:kill_process",
        max_automatic_starts=1,
    )
    first = api.start(DEPLOYMENT, parameters(config))
    wait_for("three starts", lambda: starts(api, "deadly")[2:], 400)
    runs = starts(api, "deadly")
    assert len(runs) == 3
    last = api.ended(runs[2]["id"])
    assert last["state_type"] == "FAILED", "not Crashed: nothing starts it again"
    assert "automations" in last["state"]["message"]
    assert [api.get(f"/flow_runs/{run['id']}")["state_type"] for run in runs[:2]] == ["CRASHED"] * 2
    assert runs[0]["id"] == first


@pytest.mark.usefixtures("killed")
def test_what_else_the_killed_process_ran_is_marked_and_starts_nothing(api: Api):
    """The last test: the server has waited for heartbeats of the iteration meanwhile."""

    def marked() -> list[dict[str, Any]]:
        runs = api.of_run("flow_runs", "killed-000000")
        return [run for run in runs if run["state_type"] == "CRASHED"]

    found = wait_for("the iteration of the killed process to be marked", marked)
    assert "heartbeat" in found[0]["state"]["message"]
    assert len(starts(api, "killed")) == 2
