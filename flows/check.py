"""The part of `agl check` that needs services: a model server, and one rollout."""

import time
from contextlib import AsyncExitStack
from dataclasses import replace

from agl_core.ledger.run import RunLedger
from agl_core.preflight import Checks, read_sources
from agl_core.prepared import PreparedRun
from flows.canary import check_live
from tasks import context


async def check_services(run: PreparedRun, checks: Checks) -> None:
    """Start the run's model server and run one rollout, as a run of its own in the same ledger.

    Args:
        run: What was examined; it need not have begun.
        checks: Is told of each check.

    Raises:
        ConfigError: The rollout failed.
        UpstreamError: The model server did not start or answer.
    """
    own = _own_run(run)
    async with AsyncExitStack() as stack:
        with checks("model server starts"):
            await stack.enter_async_context(context.opened(own))
        await check_live(own, checks)


def _own_run(run: PreparedRun) -> PreparedRun:
    """Return a run without datasets that will have nothing but the canary."""
    run_id = f"check-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    config = run.config.model_copy(update={"run_id": run_id})
    ledger = RunLedger(run.ledger.storage, run_id)
    ledger.code = run.record.code
    sources = read_sources(config.agent, ledger)
    own = {"sources": {name: new.ref for name, new in sources.items()}, "datasets": {}}
    record = run.record.model_copy(update={"run_id": run_id, "config": config, **own})
    ledger.start(record, list(sources.values()))
    return replace(run, config=config, ledger=ledger, record=record)
