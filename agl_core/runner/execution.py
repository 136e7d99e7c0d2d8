"""Run one agent call under a deadline, whether it is async or sync.

Neither kind can be stopped by force: a thread cannot be killed, and a coroutine may swallow its
cancellation. What still runs after its deadline is left behind and counted (`LeakCounter`), so that
the caller can stop when too much piled up.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from agl_core.runner.failure import text_of

CANCEL_GRACE_SECONDS = 2.0
"""How long a cancelled coroutine may take to clean up before it counts as leaked."""


class DeadlineExceeded(Exception):  # noqa: N818 - a verdict of this module, not an error of the agent
    """The agent did not return in time."""


class LeakCounter:
    """Agents that still run although their attempt was given up; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.threads = 0
        """Threads that run now."""
        self.tasks = 0
        """Coroutines that run now, having swallowed their cancellation."""
        self.total = 0
        """All that ever leaked, including those that ended since."""
        self._kept: set[asyncio.Task[Any]] = set()  # the event loop holds tasks weakly

    def __reduce__(self) -> Any:
        """Count from 0 in another process."""
        return type(self), ()

    def add_thread(self, thread: Future[Any]) -> None:
        """Count a thread until it ends."""
        with self._lock:
            self.threads += 1
            self.total += 1
        thread.add_done_callback(self._thread_ended)

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Count a task until it ends."""
        with self._lock:
            self.tasks += 1
            self.total += 1
        self._kept.add(task)
        task.add_done_callback(self._task_ended)

    def _thread_ended(self, thread: Future[Any]) -> None:
        del thread
        with self._lock:
            self.threads -= 1

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # seen: asyncio logs an exception that nobody retrieved
        self._kept.discard(task)
        with self._lock:
            self.tasks -= 1


async def run_coroutine(
    coroutine: Coroutine[Any, Any, Any],
    timeout_seconds: float | None,
    leaks: LeakCounter,
    grace_seconds: float = CANCEL_GRACE_SECONDS,
) -> Any:
    """Return what the coroutine returns, or raise what it raises.

    A BaseException becomes the cause of a RuntimeError; only KeyboardInterrupt and a cancellation
    go on.

    Raises:
        DeadlineExceeded: It did not end in time; it was cancelled, or leaked if it did not end
            within the grace either.
    """
    # Not a TaskGroup: that would wait for ever for a coroutine that swallows its cancellation.
    task = asyncio.create_task(_without_exit(coroutine))
    task.add_done_callback(lambda _: coroutine.close())  # cancelled before it began
    try:
        await asyncio.wait({task}, timeout=timeout_seconds)
    except asyncio.CancelledError:
        await _cancel(task, leaks, grace_seconds)
        raise
    if task.done():
        return _result(task)
    await _cancel(task, leaks, grace_seconds)
    raise DeadlineExceeded


def _result(task: asyncio.Task[Any]) -> Any:
    """Return what came of it; a BaseException of its own ends the agent, not its runner."""
    try:
        return task.result()
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _contained(error) from error


async def _without_exit(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await it; its `sys.exit` ends the agent, not the event loop."""
    try:
        return await coroutine
    except SystemExit as error:
        raise _contained(error) from error


def _contained(error: BaseException) -> RuntimeError:
    """Return an error in place of one that means something to who runs the agent: asyncio lets a
    SystemExit end the event loop, and a future with a StopIteration would never end.
    """
    return RuntimeError(
        f"the agent raised {type(error).__name__}: {text_of(error)}".removesuffix(": ")
    )


async def _cancel(task: asyncio.Task[Any], leaks: LeakCounter, grace_seconds: float) -> None:
    """Cancel the task and wait for its end within the grace; count it as leaked otherwise."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=grace_seconds)
    finally:
        if not task.done():
            leaks.add_task(task)
        elif not task.cancelled():
            task.exception()  # seen: too late to count


async def run_in_thread(
    call: Callable[[], Any], timeout_seconds: float | None, leaks: LeakCounter
) -> Any:
    """Return what the call returns in a thread with a copy of this context, or raise its error.

    A BaseException, KeyboardInterrupt too (Python interrupts only the main thread), becomes the
    cause of a RuntimeError. The thread is a daemon of its own: one that never ends does not block
    the end of the process.

    Raises:
        DeadlineExceeded: It did not end in time; its thread is counted as leaked.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    threading.Thread(
        target=_resolve, args=(future, context, call), name="agent", daemon=True
    ).start()
    waiter = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiter}, timeout=timeout_seconds)
    finally:
        if not waiter.done():
            waiter.cancel()
            leaks.add_thread(future)
    if waiter.cancelled():
        raise DeadlineExceeded
    return waiter.result()


def _resolve(future: Future[Any], context: contextvars.Context, call: Callable[[], Any]) -> None:
    """Call it and let the future have what comes of it."""
    try:
        result = context.run(call_contained, call)
    except BaseException as error:  # noqa: BLE001 - raised again where the future is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def call_contained(call: Callable[[], Any]) -> Any:
    """Return what the call returns, or raise its error; a BaseException becomes the cause of a
    RuntimeError, so that the agent's `sys.exit` ends the agent alone.
    """
    try:
        return call()
    except StopIteration as error:
        raise _contained(error) from error
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _contained(error) from error
