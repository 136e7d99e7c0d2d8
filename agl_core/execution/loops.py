"""A bundle in an event loop: attended until it has ended, or the event says so.

An event is looked at again and again: another thread or process sets it.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from agl_core.errors import ExecutionError
from agl_core.execution.events import ExecutionEvent

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1


class AlgorithmStopped(ExecutionError):  # noqa: N818 - others have the error
    """An algorithm was cancelled because the event was set; why, others know."""


async def attend(
    work: Coroutine[Any, Any, None],
    event: ExecutionEvent,
    *,
    name: str,
    grace_seconds: float,
    check: Callable[[], Awaitable[None]] | None = None,
    tick_seconds: float = TICK_SECONDS,
    must_finish: bool = False,
) -> None:
    """Await a bundle; once the event is set it has the grace to end, then is cancelled, and has the
    grace once more.

    An error, a cancellation, or a `check` that raises sets the event.

    Args:
        work: The bundle's call.
        event: Says that the work is over.
        name: Of the bundle, for messages.
        grace_seconds: How long each of the two waits may take.
        check: Called every tick; what it raises ends the bundle at once.
        tick_seconds: Between two looks at the event.
        must_finish: Whether it is an error where the bundle had to be cancelled.

    Raises:
        Exception: What the bundle, or the check, raised.
        AlgorithmStopped: It was cancelled, and must finish.
        ExecutionError: The bundle was cancelled by something of its own, or did not end in time.
    """
    task = asyncio.create_task(work)
    try:
        while not task.done() and not event.is_set():
            await asyncio.wait({task}, timeout=tick_seconds)
            if check is not None and not task.done():
                await check()
        if not task.done():
            await asyncio.wait({task}, timeout=grace_seconds)
        was_cancelled = await _cancel(task, grace_seconds)
    except BaseException:
        event.set()
        await _cancel(task, grace_seconds)
        if task.done() and not task.cancelled() and (error := task.exception()):
            logger.error("%s failed while it was stopped: %r", name, error)
        raise
    try:
        _raise_for(task, name, was_cancelled=was_cancelled)
    except BaseException:
        event.set()
        raise
    if was_cancelled and must_finish:
        raise AlgorithmStopped(f"{name} was stopped before its end, with all of its runners")


async def _cancel(task: asyncio.Task[None], grace_seconds: float) -> bool:
    """Cancel a task that still runs, wait for its end, and tell whether it was cancelled."""
    if task.done():
        return False
    task.cancel()
    await asyncio.wait({task}, timeout=grace_seconds)
    return True


def _raise_for(task: asyncio.Task[None], name: str, *, was_cancelled: bool) -> None:
    """Raise what a bundle raised, or what is wrong with its end."""
    if not task.done():
        raise ExecutionError(f"{name} goes on although it was cancelled")
    if not task.cancelled():
        task.result()
    elif was_cancelled:
        logger.warning("%s did not end by itself and was cancelled", name)
    else:
        raise ExecutionError(f"{name} was cancelled by something of its own")


def run_to_end(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end: here, or in a thread where an event loop runs here already, as in
    a notebook's cell.

    Ctrl-C cancels it and is raised when it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(main())
        return
    beside = _LoopThread(main)
    beside.start()
    try:
        beside.wait()
    except KeyboardInterrupt:
        beside.cancel()
        beside.wait()
        raise
    if beside.error is not None:
        raise beside.error


class _LoopThread(threading.Thread):
    """A thread with an event loop of its own for one coroutine."""

    def __init__(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(name="agl-loop", daemon=True)
        self._main = main
        self._runner = asyncio.Runner()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._attended())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self.error = error

    async def _attended(self) -> None:
        self._task = asyncio.current_task()
        await self._main()

    def cancel(self) -> None:
        """Cancel the coroutine, from another thread."""
        if self.is_alive() and self._task is not None:
            self._runner.get_loop().call_soon_threadsafe(self._task.cancel)

    def wait(self) -> None:
        """Wait for the end, open to Ctrl-C."""
        while self.is_alive():
            self.join(TICK_SECONDS)

    _task: "asyncio.Task[Any] | None" = None
