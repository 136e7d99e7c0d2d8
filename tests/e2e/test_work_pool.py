"""The pipeline as it is deployed: a server, a process worker, shards on the work pool."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import arun_deployment
from prefect.flow_runs import wait_for_flow_run
from prefect.states import Cancelled
from prefect_aws.credentials import AwsCredentials

from agl_core.dataset import read_jsonl
from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.lifeline import ChildProcess, spawn
from agl_core.serving.launch import ModelServer
from tests.conftest import CALCULATOR, small_run

AGL = [sys.executable, "-c", "from deployments.cli import main; main()"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("worker")]


def prefect(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def worker(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildProcess]:
    """The project's deployments, and a process worker on their pool."""
    prefect("work-pool", "create", "agl", "--type", "process", "--overwrite")
    prefect("deploy", "--all")
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "agl"]
    env = os.environ | {"PREFECT_WORKER_QUERY_SECONDS": "1"}
    with spawn([*command, "--type", "process"], log, env) as process:
        yield process


def config_on_pool(engine: ModelServer, ledger: str, run_id: str, **changes: Any) -> dict[str, Any]:
    config = small_run(engine.url, ledger, run_id=run_id, **changes)
    rollout = config.rollout.model_copy(update={"deployment": "rollout-shard/rollout-shard"})
    return config.model_copy(update={"rollout": rollout}).model_dump(mode="json")


async def test_a_deployed_run_trains_with_its_shards_on_the_pool(
    engine: ModelServer, tmp_path: Path, worker: ChildProcess
):
    config = config_on_pool(engine, str(tmp_path), "deployed")
    run = await arun_deployment(
        "training-run/training-run", parameters={"config": config}, timeout=0, as_subflow=False
    )
    run = await wait_for_flow_run(run.id, timeout=300)
    assert run.state
    assert run.state.is_completed(), f"{run.state.message}\n{worker.log_tail(40)}"
    ledger = open_run(str(tmp_path), "deployed")
    assert ledger.committed() == 2
    assert verify_run(ledger) == []
    tags = {"all_": ["deployed"]}
    async with get_client() as client:
        runs = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"tags": tags})
        )
    shards = [run for run in runs if "-train-" in run.name or "-val-" in run.name]
    assert len(shards) == 5, "base, and train and new for each of two iterations"
    assert {shard.work_pool_name for shard in shards} == {"agl"}
    assert all(shard.state and shard.state.is_completed() for shard in shards)


async def test_shards_on_the_pool_reach_a_bucket_through_a_block(
    engine: ModelServer, s3_server: str, s3_uri: str, worker: ChildProcess
):
    """The environment of the worker knows nothing of S3."""
    await AwsCredentials(
        aws_access_key_id="from-the-block",
        aws_secret_access_key="secret",  # type: ignore[arg-type]
        aws_client_parameters={"endpoint_url": s3_server},  # type: ignore[arg-type]
    ).asave("pool", overwrite=True)
    config = config_on_pool(
        engine, s3_uri, "pooled", s3={"credentials": "aws-credentials/pool"}, val_data=None
    )
    config["algorithm"]["config"]["trainer.total_training_steps"] = 1
    run = await arun_deployment(
        "training-run/training-run", parameters={"config": config}, timeout=0, as_subflow=False
    )
    run = await wait_for_flow_run(run.id, timeout=300)
    assert run.state
    assert run.state.is_completed(), f"{run.state.message}\n{worker.log_tail(40)}"
    ledger = open_run(s3_uri, "pooled")
    assert ledger.committed() == 1
    assert verify_run(ledger) == []


async def test_a_published_dataset_starts_a_run_on_it(tmp_path: Path):
    """The run that the automation makes carries the URI of the version that was published."""
    data = str(CALCULATOR / "data" / "val.jsonl")
    command = [*AGL, "dataset", "publish", "calculator", data, "--ledger", str(tmp_path)]
    published = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True
    )
    uri = published.stdout.strip()
    assert len(read_jsonl(uri)) == 64
    deadline = time.monotonic() + 60
    triggered: list[Any] = []
    async with get_client() as client:
        while not triggered:
            assert time.monotonic() < deadline, "no run was triggered within 60 s"
            await asyncio.sleep(0.5)
            runs = await client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC)
            triggered = [run for run in runs if run.parameters.get("train_data") == uri]
        (run,) = triggered
        assert run.parameters["new_run"] is True
        assert run.created_by
        assert run.created_by.type == "AUTOMATION"
        await client.set_flow_run_state(run.id, Cancelled(), force=True)


async def test_the_schedule_is_there_and_paused():
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("training-run/training-run")
    (schedule,) = deployment.schedules
    assert (schedule.slug, schedule.active) == ("nightly", False)
    assert schedule.schedule.model_dump()["cron"] == "0 2 * * *"
    assert schedule.parameters == {"new_run": True}
