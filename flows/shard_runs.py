"""Start one shard, in this process or through a deployment on a work pool, and wait for its end."""

import time
import uuid
from typing import Any

from prefect.deployments import arun_deployment
from prefect.exceptions import FlowRunWaitTimeout
from prefect.flow_runs import wait_for_flow_run

from agl_core.runner.shard import ShardRef
from flows.rollout_shard import rollout_shard

_EVENT_SECONDS = 30
"""The end of a run is told by an event; one that was lost is noticed after this long."""


async def run_shard(shard: ShardRef, num_rollouts: int) -> str:
    """Run a shard to its end, however it ends, and return why it did not complete; empty if it did.

    What its rollouts gave is in the ledger, and only there.

    Args:
        shard: What to run.
        num_rollouts: Of the shard, for its deadline.
    """
    if shard.settings.deployment is None:
        # Prefect's overloads know nothing of return_state for async flows.
        in_process: Any = rollout_shard
        state = await in_process(shard, return_state=True)
    else:
        state = await _run_on_pool(shard, num_rollouts)
    return "" if state.is_completed() else f"shard {shard.name}: {state.name}: {state.message}"


async def _run_on_pool(shard: ShardRef, num_rollouts: int) -> Any:
    """Start the shard's flow run and wait for a final state.

    Raises:
        TimeoutError: It has no final state by the deadline; the message says in which it is.
    """
    settings = shard.settings
    assert settings.deployment is not None
    run = await arun_deployment(
        settings.deployment,
        parameters={"shard": shard.model_dump(mode="json")},
        flow_run_name=shard.name,
        timeout=0,
        # For repeated requests of this call only: each claim is started once, and a run that is
        # begun anew with an emptied ledger must not find the shards of the old one.
        idempotency_key=f"{shard.name}-{uuid.uuid4().hex}",
        tags=[shard.run_id],
    )
    seconds = shard_deadline(shard, num_rollouts)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            run = await wait_for_flow_run(run.id, timeout=_EVENT_SECONDS)
        except FlowRunWaitTimeout:
            continue
        if run.state and run.state.is_final():
            return run.state
    found = run.state.name if run.state else "unknown"
    raise TimeoutError(
        f"shard {shard.name} has not ended {seconds:.0f} s after it was started on deployment "
        f"{settings.deployment} (state {found}); does its work pool have a live worker?"
    )


def shard_deadline(shard: ShardRef, num_rollouts: int) -> float:
    """Return the seconds in which a shard must start and end, every attempt at its deadline."""
    settings, failures = shard.settings, shard.failures
    rounds = -(-num_rollouts // settings.concurrency)
    rollout = failures.most_attempts() * settings.timeout_seconds + failures.longest_wait_seconds()
    return settings.startup_timeout_seconds + rounds * rollout
