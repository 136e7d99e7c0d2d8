"""Carry a run on: hold its lease while a block runs, and end the block if another process takes
over.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agl_core.errors import LeaseLostError, RunCancelled
from agl_core.ledger.run import RunLedger
from agl_core.ledger.start_record import EndReason
from agl_core.ledger.starts import RunLease


@asynccontextmanager
async def held(
    ledger: RunLedger,
    *,
    max_automatic: int,
    automatic: bool = False,
    flow_run_id: str | None = None,
    flow_run_name: str | None = None,
    cancellations: tuple[type[BaseException], ...] = (),
) -> AsyncGenerator[RunLease]:
    """Hold the run's lease; the enclosed code is cancelled if another process takes over.

    Args:
        ledger: Of the run.
        max_automatic: Starts by automations in a row, with as many iterations committed.
        automatic: Whether this is one.
        flow_run_id: Of the flow run that carries it on.
        flow_run_name: Its name.
        cancellations: Further exceptions that are someone's wish to end it.

    Raises:
        ConfigError: A living process carries the run on, or automations started it too often.
        LeaseLostError: Another process took it over meanwhile.
    """
    lease = await asyncio.to_thread(
        ledger.starts.begin,
        committed=ledger.committed(),
        max_automatic=max_automatic,
        automatic=automatic,
        flow_run_id=flow_run_id,
        flow_run_name=flow_run_name,
        code=ledger.code,
        packages=ledger.packages,
    )
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    ledger.lease = lease
    reason: EndReason = "failed"
    wishes = (asyncio.CancelledError, KeyboardInterrupt, RunCancelled, *cancellations)
    try:
        await asyncio.to_thread(lease.keep, lambda: loop.call_soon_threadsafe(task.cancel))
        yield lease
        reason = "done"
    except wishes as error:
        reason = "cancelled"
        if lease.is_lost:
            raise LeaseLostError(
                f"run {ledger.run_id!r} was taken over by another process; this one stopped"
            ) from error
        raise
    finally:
        ledger.lease = None
        lease.end(reason)
