"""What is said of a flow run that a worker has taken, on a real server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.states import Pending

from flows import pool_state
from flows.pool_state import why_never_started

POOL = "why-never-started"


@flow
def nothing() -> None: ...


@pytest.fixture
async def client(prefect_api: str) -> AsyncIterator[PrefectClient]:
    async with get_client() as found:
        await found.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        yield found
        await found.delete_work_pool(POOL)


async def taken(client: PrefectClient, worker: str = "") -> Any:
    """A flow run of a deployment on the pool that a worker has taken, and put its name on."""
    flow_id = await client.create_flow(nothing)
    deployment = await client.create_deployment(flow_id, "nothing", work_pool_name=POOL)
    run = await client.create_flow_run_from_deployment(deployment)
    await client.set_flow_run_state(run.id, Pending())
    if worker:
        await client.update_flow_run_labels(run.id, {"prefect.worker.name": worker})
    return await client.read_flow_run(run.id)


async def test_a_run_of_a_living_worker_is_waited_for(client: PrefectClient):
    await client.send_worker_heartbeat(POOL, "alive", heartbeat_interval_seconds=30)
    assert await why_never_started(await taken(client, "alive")) == ""


async def test_a_run_of_a_worker_that_is_gone_never_starts(client: PrefectClient):
    await client.send_worker_heartbeat(POOL, "alive", heartbeat_interval_seconds=30)
    why = await why_never_started(await taken(client, "dead"))
    assert why == f"worker dead of work pool {POOL} took it and is gone"


async def test_a_run_that_no_worker_put_its_name_on_is_waited_for_a_while(
    client: PrefectClient, monkeypatch: pytest.MonkeyPatch
):
    run = await taken(client)
    assert await why_never_started(run) == ""
    monkeypatch.setattr(pool_state, "_UNNAMED_SECONDS", 0.0)
    assert "died before it said which" in await why_never_started(run)
