import asyncio
import contextvars
import threading
import time

import pytest

from agl_core.runner.execution import (
    DeadlineExceeded,
    LeakCounter,
    run_coroutine,
    run_in_thread,
)


async def stubborn(release: asyncio.Event) -> str:
    while not release.is_set():
        try:
            await release.wait()
        except asyncio.CancelledError:
            continue
    return "at last"


async def test_coroutine_in_time_is_returned():
    assert await run_coroutine(asyncio.sleep(0, "x"), 1.0, LeakCounter()) == "x"
    assert await run_coroutine(asyncio.sleep(0, "x"), None, LeakCounter()) == "x"


async def test_slow_coroutine_is_cancelled_and_not_leaked():
    leaks = LeakCounter()
    with pytest.raises(DeadlineExceeded):
        await run_coroutine(asyncio.sleep(9), 0.05, leaks)
    assert leaks.total == 0


async def test_coroutine_that_swallows_its_cancellation_is_left_behind_and_counted():
    leaks, release = LeakCounter(), asyncio.Event()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await run_coroutine(stubborn(release), 0.05, leaks, grace_seconds=0.1)
    assert time.monotonic() - started < 4.0
    assert (leaks.tasks, leaks.total) == (1, 1)
    release.set()
    await asyncio.sleep(0.01)
    assert (leaks.tasks, leaks.total) == (0, 1)


async def test_cancellation_from_outside_reaches_the_coroutine_and_goes_on():
    cancelled = asyncio.Event()

    async def agent() -> None:
        try:
            await asyncio.sleep(9)
        finally:
            cancelled.set()

    runner = asyncio.create_task(run_coroutine(agent(), 5.0, LeakCounter()))
    await asyncio.sleep(0.01)
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert cancelled.is_set()


async def test_thread_sees_the_context():
    name = contextvars.ContextVar("name", default="outside")
    name.set("inside")
    assert await run_in_thread(name.get, 1.0, LeakCounter()) == "inside"


async def test_thread_past_its_deadline_is_counted_until_it_ends():
    leaks, release = LeakCounter(), threading.Event()
    with pytest.raises(DeadlineExceeded):
        await run_in_thread(release.wait, 0.05, leaks)
    assert (leaks.threads, leaks.total) == (1, 1)
    assert await run_in_thread(lambda: 1, 1.0, leaks) == 1
    release.set()
    async with asyncio.timeout(10):
        while leaks.threads:  # noqa: ASYNC110 - a counter, not an event
            await asyncio.sleep(0.01)
    assert leaks.total == 1


async def test_cancellation_from_outside_leaves_the_thread_behind():
    leaks, release = LeakCounter(), threading.Event()
    runner = asyncio.create_task(run_in_thread(release.wait, None, leaks))
    await asyncio.sleep(0.05)
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert leaks.threads == 1
    release.set()


async def test_stop_iteration_of_a_thread_does_not_hang():
    def agent() -> None:
        next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration"):
        await run_in_thread(agent, 1.0, LeakCounter())
