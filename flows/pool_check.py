"""Whether the work pool that a run's shards need will run them: asked before anything costly."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from agl_core.errors import ConfigError, TransientError
from agl_core.utils.shown_url import without_credentials
from flows.rollout_shard import rollout_shard

_FLOW = "rollout-shard"
_DEADLINE_SECONDS = 30.0


async def check_pool(deployment: str, *, needs_worker: bool = True) -> None:
    """Return if shards of this deployment would be started.

    Args:
        deployment: `rollout.deployment` of the run.
        needs_worker: Whether a worker must poll now; a run that an automation restarts waits.

    Raises:
        ConfigError: They would not; the message says why and what to do.
        TransientError: The Prefect server does not answer.
    """
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS), get_client() as client:
            await _check(client, deployment, needs_worker=needs_worker)
    except (httpx.TransportError, TimeoutError) as error:
        raise TransientError(
            f"rollout.deployment {deployment}: the Prefect server at "
            f"{without_credentials(PREFECT_API_URL.value())} does not answer: {error!r}"
        ) from error


async def _check(client: PrefectClient, name: str, *, needs_worker: bool) -> None:
    where = f"rollout.deployment {name}"
    deployment = await _find(client, where, name)
    limit = deployment.global_concurrency_limit
    if deployment.paused:
        raise ConfigError(
            f"{where} is paused: resume it, in the UI or with `prefect deployment resume`"
        )
    if limit is not None and limit.active and limit.limit < 1:
        raise ConfigError(f"{where} has a concurrency limit of 0: raise it (agl deploy)")
    if deployment.work_pool_name is None or deployment.work_queue_id is None:
        raise ConfigError(f"{where} has no work pool: `agl deploy` gives it one")
    pool = await client.read_work_pool(deployment.work_pool_name)
    queue = await client.read_work_queue(deployment.work_queue_id)
    for kind, found in (("work pool", pool), ("work queue", queue)):
        if found.is_paused:
            raise ConfigError(f"{where}: its {kind} {found.name} is paused: resume it")
        if found.concurrency_limit == 0:
            raise ConfigError(
                f"{where}: its {kind} {found.name} has a concurrency limit of 0: raise it"
            )
    await _check_own_place(client, where, pool)
    if needs_worker and not (pool.is_push_pool or pool.is_managed_pool):
        await _check_workers(client, where, pool)


async def _find(client: PrefectClient, where: str, name: str) -> DeploymentResponse:
    """Return the deployment, if it takes the shards of this version."""
    if name.split("/")[0] != _FLOW or name.count("/") != 1:
        raise ConfigError(f"{where}: give a deployment of the flow {_FLOW}, {_FLOW}/NAME")
    try:
        deployment = await client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        raise ConfigError(
            f"{where}: there is none on {without_credentials(PREFECT_API_URL.value())}; "
            "`agl deploy` makes it (set "
            "PREFECT_API_URL where that is another server), or leave it out to run shards in the "
            "training process"
        ) from error
    if deployment.parameter_openapi_schema != _own_schema():
        raise ConfigError(
            f"{where} was made by another version of this package: install this one where its "
            "worker runs, and give `agl deploy` again"
        )
    return deployment


def _own_schema() -> dict[str, Any]:
    """Return the parameters of a shard as a deployment has them: another version's differ."""
    schema: Any = rollout_shard.parameters.model_dump_for_openapi()
    return json.loads(json.dumps(schema))


async def _check_own_place(client: PrefectClient, where: str, pool: Any) -> None:
    """Refuse a pool whose one place this training run takes itself."""
    if pool.concurrency_limit != 1 or flow_run.id is None:
        return
    own = await client.read_flow_run(flow_run.id)
    if own.work_pool_name == pool.name:
        raise ConfigError(
            f"{where}: work pool {pool.name} runs one flow run at a time, and this training run is "
            "it: raise its limit, or give shards a pool of their own (agl deploy --shard-pool)"
        )


async def _check_workers(client: PrefectClient, where: str, pool: Any) -> None:
    workers = await client.read_workers_for_work_pool(pool.name)
    if any(worker.status == "ONLINE" for worker in workers):
        return
    seen = {w.last_heartbeat_time: w.name for w in workers if w.last_heartbeat_time is not None}
    known = "none ever did"
    if seen:
        last = max(seen)
        ago = (datetime.now(UTC) - last).total_seconds()
        known = f"the last one, {seen[last]}, did {ago:.0f} s ago"
    raise ConfigError(
        f"{where}: no worker polls its work pool {pool.name} ({known}): start one with "
        f"`prefect worker start --pool {pool.name} --type {pool.type}`"
    )
