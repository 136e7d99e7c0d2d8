"""How a flow run on a work pool stands, and what it waits for in words."""

import logging
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import FlowRunWaitTimeout, ObjectNotFound
from prefect.flow_runs import wait_for_flow_run
from websockets.exceptions import WebSocketException

from flows.patience import patiently

logger = logging.getLogger(__name__)

_WORKER_LABEL = "prefect.worker.name"
_UNNAMED_SECONDS = 60.0
"""A worker puts its name on a run within moments of taking it; a dead one never does."""


async def why_not_started(run: Any) -> str:
    """Return where a flow run waits and what is amiss there, as far as the server says."""
    pool_name, queue_name = run.work_pool_name, run.work_queue_name
    if pool_name is None:
        return "its deployment has no work pool"
    where = f"work pool {pool_name}, queue {queue_name}"
    try:
        async with get_client() as client:
            problems = await _problems(client, run, pool_name)
    except (httpx.HTTPError, ObjectNotFound) as error:
        return f"{where}: the Prefect server does not say more ({error!r})"
    return f"{where}: {'; '.join(problems)}"


async def _problems(client: PrefectClient, run: Any, pool_name: str) -> list[str]:
    pool = await client.read_work_pool(pool_name)
    workers = await client.read_workers_for_work_pool(pool_name)
    online = [worker.name for worker in workers if worker.status == "ONLINE"]
    found: list[str] = []
    if pool.is_paused:
        found.append("the pool is paused")
    if (
        run.work_queue_id is not None
        and (await client.read_work_queue(run.work_queue_id)).is_paused
    ):
        found.append("the queue is paused")
    if not online:
        found.append(f"no worker polls it (start one: prefect worker start --pool {pool_name})")
    else:
        found.append(f"online workers: {', '.join(online)}")
    if pool.concurrency_limit is not None:
        found.append(f"the pool runs {pool.concurrency_limit} flow runs at once")
    state = run.state.name if run.state else "unknown"
    return [*found, f"its state is {state}"]


async def why_never_started(run: Any) -> str:
    """Return why a flow run that a worker took will not start; empty while it still may.

    Prefect leaves such a run Pending for ever: no other worker takes it.
    """
    if run.work_pool_name is None or not (run.state and run.state.is_pending()):
        return ""
    taker = (run.labels or {}).get(_WORKER_LABEL)
    try:
        async with get_client() as client:
            workers = await client.read_workers_for_work_pool(run.work_pool_name)
    except (httpx.HTTPError, ObjectNotFound) as error:
        logger.debug("cannot look for the worker of flow run %s: %r", run.id, error)
        return ""
    where = f"work pool {run.work_pool_name}"
    if taker is None:
        seconds = (datetime.now(UTC) - run.state.timestamp).total_seconds()
        if seconds < _UNNAMED_SECONDS:
            return ""
        return f"a worker of {where} took it {seconds:.0f} s ago and died before it said which"
    if any(worker.name == taker and worker.status == "ONLINE" for worker in workers):
        return ""
    return f"worker {taker} of {where} took it and is gone"


async def look(run_id: UUID, seconds: int) -> Any | None:
    """Return the flow run: at once when it ends, else after these seconds; None if it is gone.

    Raises:
        httpx.TransportError: The server is away for too long.
    """
    try:
        return await wait_for_flow_run(run_id, timeout=seconds)
    except FlowRunWaitTimeout:
        pass
    except ObjectNotFound:
        return None
    except (OSError, httpx.HTTPError, WebSocketException) as error:
        logger.warning("cannot wait for flow run %s, will try again: %r", run_id, error)

    async def read() -> Any:
        async with get_client() as client:
            return await client.read_flow_run(run_id)

    return await patiently(read)
