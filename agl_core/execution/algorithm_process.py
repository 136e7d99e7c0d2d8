"""The algorithm in a process of its own, and the one runner here, where a debugger can be used."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection

from agl_core.execution.base import RunnerBundle
from agl_core.execution.child import Child, end
from agl_core.execution.events import MultiprocessingEvent
from agl_core.execution.loops import attend, run_to_end
from agl_core.execution.queue_watch import await_algorithm
from agl_core.execution.runner_processes import RunnerSettings, Work, await_store
from agl_core.execution.signals import interrupts_wait
from agl_core.store.base import LightningStore

Serving = Callable[[], AbstractAsyncContextManager[tuple[LightningStore, LightningStore | None]]]


def run_with_runner_here(
    settings: RunnerSettings, work: Work, runner: RunnerBundle, serving: Serving
) -> None:
    """Run the algorithm in a process and the runner in this one, until the algorithm has ended.

    Args:
        settings: How the process is started, and ended.
        work: The algorithm's.
        runner: Run here, as worker 0.
        serving: Returns the store for this process and the other one, while its block runs.

    Raises:
        Exception: What the algorithm or the runner raised.
        ExecutionError: The algorithm's process was killed, or waits for rollouts that the runner
            will not run any more.
    """
    context = get_context(settings.start_method)
    event = MultiprocessingEvent(context)
    told, tell = context.Pipe(duplex=False)
    args = (work.packed(settings.start_method), event, told, os.getpid(), settings.graceful_seconds)
    with ExitStack() as at_end:
        at_end.callback(event.close)
        at_end.callback(tell.close)
        with interrupts_wait():
            child = Child(context, _run_algorithm, args, "the algorithm")
            at_end.callback(end, [child], 0.0, settings.terminate_seconds)
            at_end.callback(event.set)
        told.close()
        run_to_end(lambda: _assist(settings, child, tell.send, runner, serving, event))
    if child.exit_code != 0:
        raise child.error()


async def _assist(
    settings: RunnerSettings,
    child: Child,
    tell: Callable[[LightningStore | None], None],
    runner: RunnerBundle,
    serving: Serving,
    event: MultiprocessingEvent,
) -> None:
    def is_over() -> bool:
        return child.exit_code is not None

    async def check() -> None:
        if is_over():
            event.set()

    async with serving() as (ours, theirs):
        tell(theirs)
        try:
            await attend(
                runner(ours, 0, event),
                event,
                name="the runner",
                grace_seconds=settings.graceful_seconds,
                check=check,
            )
            await await_algorithm(is_over, ours)
        finally:
            event.set()
            await asyncio.to_thread(
                end, [child], settings.graceful_seconds, settings.terminate_seconds
            )


def _run_algorithm(
    work: "Work | bytes",
    event: MultiprocessingEvent,
    told: Connection,
    parent_pid: int,
    grace_seconds: float,
) -> None:
    """Be the algorithm's process."""
    given = Work.unpacked(work)
    if (store := await_store(told, event, parent_pid)) is not None:
        asyncio.run(
            attend(
                given.bundle(store[0] or given.store, event),
                event,
                name="the algorithm",
                grace_seconds=grace_seconds,
                must_finish=True,
            )
        )
