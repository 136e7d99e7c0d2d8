"""A flow that is stopped says why."""

import asyncio
import sys
import uuid

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Cancelling

from agl_core.errors import RunCancelled
from flows.cancellation import until_cancelled
from flows.failure import fails_in_one_sentence


@flow(flow_run_name="waiting", validate_parameters=False)
async def waiting(running: "asyncio.Future[str]") -> None:
    running.set_result(str(flow_run.id))
    await until_cancelled(asyncio.sleep(60))


@flow(flow_run_name="whole", validate_parameters=False)
async def whole(running: "asyncio.Future[str]") -> None:
    await waiting(running)


@pytest.mark.parametrize(
    ("started", "in_ui", "said"),
    [
        (waiting, False, "waiting was interrupted"),
        (waiting, True, "waiting was cancelled"),
        (whole, False, "waiting was stopped with what it is part of"),
    ],
)
@pytest.mark.usefixtures("prefect_api")
async def test_a_flow_that_is_stopped_says_by_whom(started, in_ui: bool, said: str):
    running: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(started(running))
    run_id = uuid.UUID(await running)
    if in_ui:
        async with get_client() as client:
            await client.set_flow_run_state(run_id, Cancelling())
    task.cancel()
    with pytest.raises(RunCancelled, match=said):
        await task


@flow(flow_run_name="exiting", validate_parameters=False)
@fails_in_one_sentence
async def exiting() -> None:
    await asyncio.sleep(0)
    sys.exit(3)


@flow(flow_run_name="above", validate_parameters=False)
@fails_in_one_sentence
async def above() -> None:
    await exiting()


@pytest.mark.usefixtures("prefect_api")
async def test_sys_exit_in_a_flow_crashes_it_and_those_above_and_cancels_none():
    state = await above(return_state=True)
    assert state.is_crashed()
    assert "exiting crashed: code in its process called sys.exit(3)" in str(state.message)
