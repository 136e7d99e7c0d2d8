"""Start a deployed training run and wait for its end."""

import asyncio
import logging
import time
from typing import Any

from prefect.client.orchestration import get_client
from prefect.deployments import arun_deployment
from prefect.exceptions import FlowRunWaitTimeout, ObjectNotFound
from prefect.flow_runs import wait_for_flow_run
from prefect.states import Cancelling

from agl_core.config import RunConfig
from agl_core.errors import ConfigError, ExecutionError
from flows.patience import patiently
from flows.pool_state import look, why_not_started

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 30
_CANCEL_SECONDS = 60


async def run_deployed(
    config: RunConfig,
    deployment: str,
    *,
    allow_changed: bool,
    startup_timeout_seconds: float,
    timeout_seconds: float,
) -> None:
    """Run a configuration by a deployment of `training-run` and return when it has completed.

    Args:
        config: What to train.
        deployment: `training-run/NAME`.
        allow_changed: Go on with a run that exists with another identity.
        startup_timeout_seconds: How long it may wait for a worker.
        timeout_seconds: How long the whole may take.

    Raises:
        ConfigError: There is no such deployment.
        ExecutionError: It did not complete, or not in time; then it was cancelled.
        asyncio.CancelledError: This was cancelled, and so was the run.
    """
    try:
        run = await patiently(
            lambda: arun_deployment(
                deployment,
                parameters={
                    "config": config.model_dump(mode="json"),
                    "allow_changed": allow_changed,
                },
                timeout=0,
                as_subflow=False,
                tags=[config.run_id],
            )
        )
    except ObjectNotFound as error:
        raise ConfigError(
            f"there is no deployment {deployment}: `agl deploy` makes it, or name another"
        ) from error
    logger.info("run %s is flow run %s", config.run_id, run.id)
    try:
        ended = await _ended(run, config.run_id, startup_timeout_seconds, timeout_seconds)
    except (asyncio.CancelledError, ExecutionError):
        await _cancel(run)
        raise
    if not ended.state.is_completed():
        raise ExecutionError(
            f"run {config.run_id} ended as {ended.state.name}: {ended.state.message}"
        )


async def _ended(run: Any, run_id: str, startup_seconds: float, timeout_seconds: float) -> Any:
    """Return the flow run when it has ended; say from time to time what it waits for.

    Raises:
        ExecutionError: It did not start or end in time, or it was deleted.
    """
    asked = time.monotonic()
    while True:
        found = await look(run.id, _LOOK_SECONDS)
        waited = time.monotonic() - asked
        if found is None:
            raise ExecutionError(f"run {run_id}: its flow run {run.id} was deleted")
        if found.state and found.state.is_final():
            return found
        if found.start_time is None:
            why = await why_not_started(found)
            if waited > startup_seconds:
                raise ExecutionError(
                    f"run {run_id} was not started within {startup_seconds:.0f} s: {why}"
                )
            logger.warning("run %s has waited to be started for %.0f s: %s", run_id, waited, why)
        elif waited > timeout_seconds:
            raise ExecutionError(f"run {run_id} has not ended within {timeout_seconds:.0f} s")
        else:
            logger.info("run %s has been %s for %.0f s", run_id, found.state_name, waited)


async def _cancel(run: Any) -> None:
    """Have the run stop, and wait a while for it."""

    async def set_it() -> None:
        async with get_client() as client:
            await client.set_flow_run_state(run.id, Cancelling(message="the trainer was stopped"))

    await patiently(set_it)
    try:
        await wait_for_flow_run(run.id, timeout=_CANCEL_SECONDS)
    except FlowRunWaitTimeout:
        logger.warning(
            "flow run %s has not ended %.0f s after it was cancelled",
            run.id,
            _CANCEL_SECONDS,
        )
