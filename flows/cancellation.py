"""Stop a flow when its run is cancelled: in the UI, by the API, or with this process.

Nobody else stops flows of `agl run`, which has no worker; and a worker takes longer. So each flow
looks at the state of its own run, and is also stopped with the flow that it is part of. It ends as
Cancelled, in time: what does not stop (an agent in a thread) is left to the end of the process.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from agl_core.errors import ExecutionError, RunCancelled

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LOOK_SECONDS = 3.0
"""Between two looks at the flow run's state."""
_ASK_SECONDS = 2.0
"""In which the server must say whether a flow run that is stopped was cancelled."""
_STOP_SECONDS = 8.0
"""In which a cancelled flow must stop."""


class ProcessExit(ExecutionError):  # noqa: N818 - what happened, which ends a flow as Crashed
    """Code in a flow's process called `sys.exit`, which would have ended the process."""


async def until_cancelled(body: Coroutine[Any, Any, Result]) -> Result:
    """Return what a flow's body returns.

    Raises:
        RunCancelled: Its flow run was cancelled, or this code was.
        ProcessExit: Code in the body called `sys.exit`.
    """
    task = asyncio.create_task(_without_exit(body))
    watch = asyncio.create_task(_cancellation(flow_run.id))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RunCancelled(watch.result())
    except asyncio.CancelledError as error:
        this = asyncio.current_task()
        if this is None or not this.cancelling():
            raise
        this.uncancel()  # the flow run ends as Cancelled instead
        raise RunCancelled(await _why_stopped(), interrupted=True) from error
    finally:
        watch.cancel()
        await _stop(task)


async def _without_exit(body: Coroutine[Any, Any, Result]) -> Result:
    """Await the body. SystemExit would end the event loop and so cancel every flow in it, which
    looks like an interrupt.
    """
    try:
        return await body
    except SystemExit as error:
        raise ProcessExit(
            f"{flow_run.name} crashed: code in its process called sys.exit({error.code!r})"
        ) from error


async def _why_stopped() -> str:
    """Return a sentence that says why this flow's code was cancelled."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is not None and run.parent_task_run_id is not None:
        return f"{flow_run.name} was stopped with what it is part of"
    try:
        async with asyncio.timeout(_ASK_SECONDS), get_client() as client:
            is_cancelled = run is not None and _is_cancelled(await client.read_flow_run(run.id))
    except (httpx.HTTPError, ObjectNotFound, TimeoutError):
        is_cancelled = False
    return f"{flow_run.name} was {'cancelled' if is_cancelled else 'interrupted'}"


def _is_cancelled(run: FlowRun) -> bool:
    return run.state is not None and (run.state.is_cancelling() or run.state.is_cancelled())


async def _stop(task: asyncio.Task[Any]) -> None:
    """Cancel a body and wait for its end; say so if it does not end."""
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task}, timeout=_STOP_SECONDS)
    if not task.done():
        logger.error(
            "flow run %s was cancelled and still runs after %.0f s; it is left to the end of this "
            "process",
            flow_run.name,
            _STOP_SECONDS,
        )
    elif not task.cancelled() and (error := task.exception()) is not None:
        logger.info("how flow run %s stopped: %s", flow_run.name, error)


async def _cancellation(flow_run_id: str | None) -> str:
    """Return once the flow run is cancelled, with a sentence that says so.

    A server that is away cannot be told of a cancellation either: it is asked again.
    """
    while flow_run_id is not None:
        try:
            async with get_client() as client:
                while True:
                    await asyncio.sleep(_LOOK_SECONDS)
                    run = await client.read_flow_run(UUID(flow_run_id))
                    if _is_cancelled(run):
                        return f"flow run {run.name} was cancelled"
        except ObjectNotFound:
            break  # deleted in the UI: that is no cancellation
        except httpx.HTTPError as error:
            logger.debug("cannot look whether flow run %s is cancelled: %r", flow_run_id, error)
            await asyncio.sleep(_LOOK_SECONDS)
    return await asyncio.get_running_loop().create_future()
