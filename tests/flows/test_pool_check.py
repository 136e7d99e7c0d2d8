"""Each thing that keeps a work pool from running shards has its own sentence."""

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed
from typer.testing import CliRunner

from agl_core.errors import ConfigError
from deployments.cli import app
from flows.pool_check import check_pool
from tests.e2e.deployed import Api

POOL, NAME = "checked", "rollout-shard/rollout-shard"


@pytest.fixture(scope="module")
def api(prefect_api: str) -> Iterator[Api]:
    """A deployment whose pool has a worker that has just polled."""
    done = CliRunner().invoke(app, ["deploy", "--pool", POOL, "--shard-limit", "4"])
    assert done.exit_code == 0, done.exception
    with Api(prefect_api) as client:
        yield client
        client.remove_automations()


@pytest.fixture
def worker(api: Api) -> Iterator[None]:
    heartbeat = {"name": "here", "heartbeat_interval_seconds": 30}
    _sent("POST", f"{api.url}/work_pools/{POOL}/workers/heartbeat", heartbeat)
    yield
    _sent("DELETE", f"{api.url}/work_pools/{POOL}/workers/here")


def change(api: Api, thing: str, values: dict[str, Any]) -> None:
    deployment = api.get(f"/deployments/name/{NAME}")
    path = {
        "deployment": f"/deployments/{deployment['id']}",
        "pool": f"/work_pools/{POOL}",
        "queue": f"/work_queues/{deployment['work_queue_id']}",
        "limit": f"/v2/concurrency_limits/{deployment['global_concurrency_limit']['id']}",
    }[thing]
    _sent("PATCH", f"{api.url}{path}", values)


@retry(
    retry=retry_if_exception(lambda error: "503" in str(error)),  # SQLite was busy for long
    stop=stop_after_delay(60),
    wait=wait_fixed(1),
    reraise=True,
)
def _sent(method: str, url: str, values: dict[str, Any] | None = None) -> None:
    httpx.request(method, url, json=values).raise_for_status()


@pytest.mark.parametrize(
    ("thing", "wrong", "right", "message"),
    [
        ("deployment", {"paused": True}, {"paused": False}, f"{NAME} is paused: resume it, in "),
        ("limit", {"limit": 0}, {"limit": 4}, f"{NAME} has a concurrency limit of 0: raise it"),
        ("pool", {"is_paused": True}, {"is_paused": False}, "its work pool checked is paused: res"),
        (
            "pool",
            {"concurrency_limit": 0},
            {"concurrency_limit": None},
            "its work pool checked has a concurrency limit of 0: raise it",
        ),
        ("queue", {"is_paused": True}, {"is_paused": False}, "its work queue default is paused: "),
        (
            "queue",
            {"concurrency_limit": 0},
            {"concurrency_limit": None},
            "its work queue default has a concurrency limit of 0: raise it",
        ),
    ],
)
@pytest.mark.usefixtures("worker")
def test_what_stops_a_pool_is_named(
    api: Api, thing: str, wrong: dict[str, Any], right: dict[str, Any], message: str
):
    asyncio.run(check_pool(NAME))
    change(api, thing, wrong)
    try:
        with pytest.raises(ConfigError) as caught:
            asyncio.run(check_pool(NAME))
    finally:
        change(api, thing, right)
    assert message in str(caught.value)
    asyncio.run(check_pool(NAME))


def refusal() -> str | None:
    try:
        asyncio.run(check_pool(NAME))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.usefixtures("worker")
def test_a_deployment_of_another_version_is_refused(api: Api):
    schema = api.get(f"/deployments/name/{NAME}")["parameter_openapi_schema"]
    older = {**schema, "properties": {}, "definitions": {}, "required": []}
    change(api, "deployment", {"parameter_openapi_schema": older})
    try:
        with pytest.raises(ConfigError, match="was made by another version of this package"):
            asyncio.run(check_pool(NAME))
    finally:
        change(api, "deployment", {"parameter_openapi_schema": schema})


def test_a_pool_without_a_live_worker_is_named_with_the_last_one(api: Api):
    with pytest.raises(
        ConfigError, match=r"no worker polls its work pool checked \(none ever did\)"
    ):
        asyncio.run(check_pool(NAME))
    asyncio.run(check_pool(NAME, needs_worker=False))
    heartbeat = {"name": "gone", "heartbeat_interval_seconds": 1}
    path = f"{api.url}/work_pools/{POOL}/workers"
    httpx.post(f"{path}/heartbeat", json=heartbeat).raise_for_status()
    deadline = time.monotonic() + 60  # the server looks every 15 s for workers that went silent
    while (said := refusal()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert re.search(
        r"the last one, gone, did \d+ s ago\): start one with `prefect worker start", said
    )
    httpx.delete(f"{path}/gone").raise_for_status()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rollout-shard/none", "there is none on http://127.0.0.1:"),
        ("training-run/training-run", "give a deployment of the flow rollout-shard"),
        ("shards", "give a deployment of the flow rollout-shard"),
    ],
)
@pytest.mark.usefixtures("api")
def test_a_deployment_that_cannot_run_shards_is_refused(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(check_pool(name))
