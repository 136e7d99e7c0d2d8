"""A run whose processes are killed or cancelled while agents work: real processes, real signals.

The agents of these runs wait for a file, so that what happens to them happens while they work.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from agl_core.config import RolloutSettings, RunConfig
from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.verify import verify_run
from agl_core.lifeline import ChildProcess, spawn
from agl_core.serving.launch import ModelServer
from deployments.cli import app
from deployments.server import SERVER_SETTINGS, free_port
from tests.conftest import small_run
from tests.e2e.deployed import Api, deployed, start_worker
from tests.e2e.killable_run import KillableRun

pytestmark = pytest.mark.slow

PREFECT = Path(sys.executable).with_name("prefect")


@dataclass
class Campaign:
    """A small run whose agents wait at a gate."""

    config: RunConfig
    gate: Path
    folder: Path

    def wait_for_agents(self, number: int, run: KillableRun) -> None:
        """Return once so many wait."""
        wait_until(lambda: len(self.waiting()) >= number or not run.is_running, self.log)
        assert run.is_running, self.log()

    @property
    def ledger(self) -> RunLedger:
        return open_run(self.config.ledger, self.config.run_id)

    @property
    def rollouts(self) -> RolloutSet:
        return RolloutSet(self.ledger.iteration(0), "train")

    def open_gate(self) -> None:
        self.gate.touch()

    def waiting(self) -> list[str]:
        """Agents that wait, or did when their process died: each leaves a file with its pid."""
        return [path.name for path in self.folder.glob("waiting-*")]

    def started(self, **options: Any) -> KillableRun:
        """The run in a process of its own; killed at the end of the block if it still runs."""
        return KillableRun(self.config, self.folder / "run.log", **options)

    def log(self) -> str:
        return (self.folder / "run.log").read_text()[-4000:]

    def finish(self) -> None:
        """Let the agents go on, and run to the end."""
        self.open_gate()
        with self.started() as run:
            assert run.wait(240) == 0, self.log()
        self.check()

    def check(self) -> None:
        """Every rollout was used once; the manifest is as the files are."""
        (manifest,) = self.ledger.manifests()
        assert manifest.coverage.trained == manifest.coverage.expected == 16
        assert verify_run(self.ledger) == []
        table = self.rollouts.outcomes()
        final = table.filter(table["final"])
        assert final["index"].to_pylist() == list(range(16))
        assert set(final["kind"].to_pylist()) == {"succeeded"}


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str], seconds: float = 240.0
) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.2)
    return found


@pytest.fixture
def campaign(
    engine: ModelServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Campaign]:
    gate = tmp_path / "gate"
    rows = [{"question": f"{n}+1", "gate": str(gate), "sync": True} for n in range(4)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    name = request.node.name.replace("_", "-")[:32].strip("-")
    config = small_run(
        engine.url,
        str(tmp_path / "ledger"),
        run_id=f"{name}-{uuid.uuid4().hex[:6]}",  # the server is shared
        agent="tests.agents:waits_at_a_gate",
        train_data=str(data),
        val_data=None,
        rollout=RolloutSettings(timeout_seconds=200.0, concurrency=8, flush_seconds=1.0),
    )
    verl = config.algorithm.config | {"trainer.total_training_steps": 1}
    algorithm = config.algorithm.model_copy(update={"config": verl})
    found = Campaign(config.model_copy(update={"algorithm": algorithm}), gate, tmp_path)
    yield found
    found.open_gate()  # threads of this process that still wait


@pytest.fixture
def pooled(campaign: Campaign, worker: ChildProcess) -> Campaign:
    """The same with two shards on the work pool."""
    rollout = campaign.config.rollout.model_copy(
        update={"deployment": "rollout-shard/rollout-shard", "shard_size": 8}
    )
    campaign.config = campaign.config.model_copy(update={"rollout": rollout})
    return campaign


@pytest.fixture
def api(prefect_api: str) -> Iterator[Api]:
    with Api(prefect_api) as client:
        yield client


@pytest.fixture(scope="module")
def worker(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildProcess]:
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    env = os.environ | {"PREFECT_API_URL": prefect_api}
    with deployed(PREFECT, Path.cwd(), log, env, only="rollout-shard") as process:
        yield process


def cancel(api: Api, name: str) -> None:
    """Cancel a flow run as the UI does."""
    (run,) = api.post("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
    state = {"type": "CANCELLING", "name": "Cancelling"}
    api.post(f"/flow_runs/{run['id']}/set_state", state=state)


def states(api: Api, campaign: Campaign) -> dict[str, str]:
    return {
        run["name"]: run["state_type"] for run in api.of_run("flow_runs", campaign.config.run_id)
    }


def shard_processes(campaign: Campaign) -> list[int]:
    """Process ids of the shards on the pool, by their signs of life."""
    storage = campaign.ledger.storage
    prefix = campaign.ledger.starts.signs_prefix
    keys = [key for key in storage.list(prefix) if key.endswith(".alive.json")]
    return sorted({files.read_json(storage, Unrecorded(key))["pid"] for key in keys})


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_all(child: ChildProcess) -> None:
    """Kill a command and everything that it started."""
    for process in psutil.Process(child.pid).children(recursive=True):
        process.kill()


@pytest.mark.parametrize(
    "part", ["-000000", pytest.param("", marks=pytest.mark.long)], ids=["iteration", "run"]
)
def test_cancelling_in_the_ui_stops_a_run_without_a_worker_and_it_goes_on_later(
    campaign: Campaign, api: Api, part: str
):
    run_id = campaign.config.run_id
    with campaign.started() as run:
        campaign.wait_for_agents(8, run)
        sent = time.monotonic()
        cancel(api, f"{run_id}{part}")
        run.wait(30)
        assert time.monotonic() - sent < 20, "agents end with the process that they are threads of"
    assert "was cancelled" in campaign.log()
    found = states(api, campaign)
    assert set(found.values()) == {"CANCELLED"}, found
    assert len(found) == 3, "the run, its iteration, its shard"
    assert campaign.ledger.starts.end_reason(1) == "cancelled"
    table = campaign.rollouts.outcomes()
    assert set(table["kind"].to_pylist()) == {"cancelled"}
    assert not pc.any(table["final"]).as_py()
    if part:
        campaign.finish()


def test_cancelling_stops_the_shards_on_the_pool(pooled: Campaign, api: Api):
    """Their agents are threads that do not end: the shards' processes do."""
    with pooled.started() as run:
        pooled.wait_for_agents(16, run)
        shards = shard_processes(pooled)
        assert len(shards) == 2
        sent = time.monotonic()
        cancel(api, pooled.config.run_id)
        wait_until(lambda: not any(map(lives, shards)), "a shard lives on", 30)
        assert time.monotonic() - sent < 20
        run.wait(30)
        assert time.monotonic() - sent < 30
    assert states(api, pooled)[pooled.config.run_id] == "CANCELLED"
    assert pooled.rollouts.unfinished() == list(range(16))


@pytest.mark.long
def test_a_retried_shard_runs_only_what_is_left_of_it(pooled: Campaign, api: Api):
    """Its run was killed, and so was it; someone retries it in the UI, then starts the run."""
    with pooled.started() as run:
        pooled.wait_for_agents(16, run)
        run.kill()
    name = f"{pooled.config.run_id}-000000-train-0001"
    sign = pooled.ledger.starts.shard_key(1, "000000-train-0001", "alive")
    os.kill(files.read_json(pooled.ledger.storage, Unrecorded(sign))["pid"], signal.SIGKILL)
    wait_until(lambda: states(api, pooled)[name] == "CRASHED", "not seen by its worker")
    pooled.open_gate()
    (shard,) = api.post("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
    scheduled = {"type": "SCHEDULED", "name": "AwaitingRetry"}
    api.post(f"/flow_runs/{shard['id']}/set_state", state=scheduled, force=True)
    wait_until(lambda: not pooled.rollouts.unfinished(), "the shard was not run again")
    first, second, retry = pooled.rollouts.claims()
    assert (retry.retry_of, retry.indices) == (1, first.indices)
    assert set(pooled.rollouts.deciding_claims().values()) == {second.number, retry.number}
    assert len(pooled.waiting()) == 24, "16 attempts, and 8 of the retry"
    pooled.finish()
    assert len(pooled.waiting()) == 24
    assert states(api, pooled)[name] == "COMPLETED"
    api.post(f"/flow_runs/{shard['id']}/set_state", state=scheduled, force=True)

    def shown() -> dict[str, Any]:
        (found,) = api.post("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
        return found["state"]

    wait_until(
        lambda: (shown()["message"] or "").startswith("kept as it was: shard"), "not refused"
    )
    assert shown()["type"] == "COMPLETED"
    assert len(pooled.waiting()) == 24


def test_shards_of_a_run_that_was_killed_stop_and_their_results_are_unused(
    pooled: Campaign, api: Api
):
    with pooled.started() as run:
        pooled.wait_for_agents(16, run)
        run.kill()
    old = shard_processes(pooled)
    assert all(map(lives, old))
    rollout = pooled.config.rollout.model_copy(update={"deployment": None, "shard_size": None})
    pooled.config = pooled.config.model_copy(update={"rollout": rollout})
    with pooled.started() as run:
        wait_until(lambda: not any(map(lives, old)) or not run.is_running, "an old shard lives")
        assert run.is_running, pooled.log()
        pooled.open_gate()
        assert run.wait(240) == 0, pooled.log()
    pooled.check()
    assert pooled.ledger.starts.end_reason(1) == "superseded"
    assert set(pooled.rollouts.deciding_claims().values()) == {3}


def test_a_second_start_is_refused_while_the_first_lives(campaign: Campaign):
    with campaign.started() as run:
        campaign.wait_for_agents(1, run)
        second = Campaign(campaign.config, campaign.gate, campaign.folder / "second")
        second.folder.mkdir()
        with second.started() as other:
            assert other.wait(60) != 0
        assert f"is carried on by flow run {campaign.config.run_id}, process {run.pid} on host" in (
            second.log()
        )
        assert run.is_running


@pytest.mark.long  # `tests/chaos/test_pool.py` kills a worker too; here its shard dies with it
def test_a_shard_whose_worker_died_with_it_is_replaced(
    pooled: Campaign, api: Api, prefect_api: str, worker: ChildProcess, tmp_path: Path
):
    """Prefect leaves its run in the state Running."""
    env = os.environ | {"PREFECT_API_URL": prefect_api}
    with pooled.started(lost_seconds=20.0) as run:
        pooled.wait_for_agents(16, run)
        victims = shard_processes(pooled)
        kill_all(worker)
        wait_until(lambda: not any(map(lives, victims)), "a shard outlives its worker", 10)
        pooled.open_gate()
        with start_worker(PREFECT, tmp_path / "worker.log", env):
            assert run.wait(240) == 0, pooled.log()
    pooled.check()
    messages = [
        run["state"]["message"]
        for run in api.of_run("flow_runs", pooled.config.run_id)
        if run["state_type"] == "CRASHED"
    ]
    assert len(messages) == 2
    assert all("given up and replaced: process" in message for message in messages)


def test_a_shard_whose_worker_died_before_it_began_is_replaced(
    campaign: Campaign, api: Api, prefect_api: str, tmp_path: Path
):
    """Prefect leaves its run Pending, and no other worker takes it."""
    pool = f"pool-{uuid.uuid4().hex[:6]}"
    env = os.environ | {"PREFECT_API_URL": prefect_api, "PREFECT_WORKER_HEARTBEAT_SECONDS": "1"}
    deploy_to(pool)
    rollout = campaign.config.rollout.model_copy(
        update={"deployment": "rollout-shard/rollout-shard"}
    )
    campaign.config = campaign.config.model_copy(update={"rollout": rollout})
    campaign.open_gate()
    run_id = campaign.config.run_id

    def taken() -> bool:
        found = [run for run in api.of_run("flow_runs", run_id) if "-train-" in run["name"]]
        return bool(
            found
            and found[0]["state_type"] == "PENDING"
            and "prefect.worker.name" in found[0]["labels"]
        )

    first_worker = start_worker(PREFECT, tmp_path / "first.log", env, pool)
    with first_worker as first, campaign.started() as run:
        wait_until(taken, campaign.log)
        kill_all(first)
        with start_worker(PREFECT, tmp_path / "second.log", env, pool):
            assert run.wait(240) == 0, campaign.log()
    campaign.check()
    (given_up,) = [
        shard["state"]["message"]
        for shard in api.of_run("flow_runs", run_id)
        if shard["state_type"] == "CRASHED"
    ]
    assert re.search(rf"given up and replaced: worker worker-\w+ of work pool {pool}", given_up)


def test_a_deployed_training_run_outlives_its_worker(
    campaign: Campaign, api: Api, prefect_api: str, tmp_path: Path
):
    """Its worker read its output, and Prefect's console ends a process that cannot write."""
    pool = f"pool-{uuid.uuid4().hex[:6]}"
    deploy_to(pool)
    env = os.environ | {"PREFECT_API_URL": prefect_api, "PYTHONPATH": str(Path.cwd())}
    del env["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"]
    command = [str(PREFECT), "worker", "start", "--pool", pool, "--name", pool]
    with (tmp_path / "worker.log").open("wb") as output:
        worker = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    try:
        values = campaign.config.model_dump(mode="json")
        flow_run_id = api.start("training-run/training-run", {"config": values})
        wait_until(lambda: len(campaign.waiting()) >= 8, "no agent works")
        start = campaign.ledger.starts.latest()
        assert start is not None
        worker.kill()
        worker.wait()
        wait_until(lambda: output_of(start.pid) == {"/dev/null"}, "output goes to nobody", 20)
        campaign.open_gate()
        ended = api.ended(flow_run_id)
    finally:
        worker.kill()
    assert ended["state_type"] == "COMPLETED", ended["state"]
    campaign.check()


def output_of(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{descriptor}") for descriptor in (1, 2)}


def deploy_to(pool: str) -> None:
    done = CliRunner().invoke(app, ["deploy", "--pool", pool])
    assert done.exit_code == 0, done.exception


@pytest.mark.long  # `tests/chaos` has a killed server too; this one is away for longer
def test_a_run_outlives_an_outage_of_its_server(campaign: Campaign, tmp_path: Path):
    """The server is killed while agents work and started again on its database."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    env = os.environ | SERVER_SETTINGS
    env |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": url}
    command = [str(PREFECT), "server", "start", "--host", "127.0.0.1", "--port", str(port)]

    def healthy() -> bool:
        with Api(url) as client:
            return client.is_healthy()

    server = spawn(command, tmp_path / "server.log", env)
    try:
        wait_until(healthy, "no server")
        with campaign.started(url=url) as run:
            campaign.wait_for_agents(8, run)
            kill_all(server)
            server.stop()
            time.sleep(10)
            server = spawn(command, tmp_path / "server.log", env)
            campaign.open_gate()
            assert run.wait(240) == 0, campaign.log()
        campaign.check()
        with Api(url) as client:
            found = states(client, campaign)
        shards = {name: found.pop(name) for name in list(found) if "-train-" in name}
        assert set(found.values()) == {"COMPLETED"}, found
        # One that the outage failed was replaced.
        assert set(shards.values()) <= {"COMPLETED", "FAILED"}, shards
        assert "COMPLETED" in shards.values()
    finally:
        server.stop()
