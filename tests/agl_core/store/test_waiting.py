import asyncio
import contextlib
import math
import threading
import time

import pytest

from agl_core.store import CollectionBasedLightningStore as Store
from tests.agl_core.store.builders import begin
from tests.agl_core.store.conftest import OpenStore


async def end(store: Store, rollout_id: str, after: float = 0) -> None:
    await asyncio.sleep(after)
    await store.update_rollout(rollout_id, status="succeeded")


async def test_what_has_ended_is_returned_at_once_in_the_given_order(store: Store):
    ids = [(await begin(store)).rollout_id for _ in range(3)]
    for rollout_id in ids:
        await end(store, rollout_id)
    asked = [ids[2], ids[0], ids[1], ids[0]]
    for timeout in (None, 0, 5):
        waited = await store.wait_for_rollouts(rollout_ids=asked, timeout=timeout)
        assert [rollout.rollout_id for rollout in waited] == [ids[2], ids[0], ids[1]]


async def test_a_wait_without_limit_ends_with_the_last_rollout(store: Store):
    ids = [(await begin(store)).rollout_id for _ in range(3)]
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(store.wait_for_rollouts(rollout_ids=ids))
        for number, rollout_id in enumerate(ids):
            assert not waiting.done()
            await end(store, rollout_id, after=0.02 * number)
    assert [rollout.rollout_id for rollout in waiting.result()] == ids


async def test_a_limit_gives_those_that_have_ended_by_then(store: Store):
    first, second = await begin(store), await begin(store)
    await end(store, first.rollout_id)
    started = time.monotonic()
    waited = await store.wait_for_rollouts(
        rollout_ids=[first.rollout_id, second.rollout_id], timeout=0.3
    )
    assert 0.25 < time.monotonic() - started < 8
    assert [rollout.rollout_id for rollout in waited] == [first.rollout_id]


async def test_a_limit_of_zero_does_not_wait(store: Store):
    taken = await begin(store)
    assert await store.wait_for_rollouts(rollout_ids=[taken.rollout_id], timeout=0) == []
    assert await store.wait_for_rollouts(rollout_ids=[], timeout=None) == []


async def test_a_limit_that_is_no_number_is_refused(store: Store):
    taken = await begin(store)
    waiting = store.wait_for_rollouts(rollout_ids=[taken.rollout_id], timeout=math.nan)
    with pytest.raises(ValueError, match="timeout is NaN"):
        await asyncio.wait_for(waiting, 5)


async def test_unknown_rollouts_are_not_waited_for(store: Store):
    assert await store.wait_for_rollouts(rollout_ids=["ro-0"], timeout=60) == []
    assert await store.wait_for_rollouts(rollout_ids=["ro-0"]) == []


async def test_several_calls_may_wait_for_the_same_rollout(store: Store):
    taken = await begin(store)
    other = await begin(store)
    async with asyncio.TaskGroup() as group:
        waits = [
            group.create_task(store.wait_for_rollouts(rollout_ids=[taken.rollout_id]))
            for _ in range(5)
        ]
        both = group.create_task(
            store.wait_for_rollouts(rollout_ids=[taken.rollout_id, other.rollout_id])
        )
        await end(store, taken.rollout_id, after=0.05)
        await asyncio.wait(waits, timeout=5)
        assert not both.done()
        await end(store, other.rollout_id)
    assert all(len(wait.result()) == 1 for wait in waits)


@pytest.mark.in_process
async def test_a_cancelled_wait_leaves_nothing_behind(store: Store):
    taken = await begin(store)
    task = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[taken.rollout_id]))
    await asyncio.sleep(0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert store._waiters.pending() == []  # pyright: ignore[reportPrivateUsage]
    await end(store, taken.rollout_id)


async def test_many_rollouts_are_waited_for_without_a_thread_each(store: Store):
    ids = [(await store.enqueue_rollout(n)).rollout_id for n in range(200)]
    before = threading.active_count()
    waits = [
        asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout_id])) for rollout_id in ids
    ]
    await asyncio.sleep(0.02)
    assert threading.active_count() <= before
    for rollout_id in ids:
        await end(store, rollout_id)
    assert len(await asyncio.gather(*waits)) == 200


@pytest.mark.in_process
async def test_a_store_that_closes_ends_its_waits(open_store: OpenStore):
    store = open_store()
    taken = await begin(store)
    task = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[taken.rollout_id]))
    await asyncio.sleep(0.02)
    await store.close()
    with pytest.raises(ValueError, match="is closed"):
        await asyncio.wait_for(task, 5)


def test_a_wait_ends_when_another_thread_ends_the_rollout(open_store: OpenStore):
    store = open_store()
    taken = asyncio.run(begin(store))
    thread = threading.Thread(target=lambda: asyncio.run(end(store, taken.rollout_id, 0.1)))
    thread.start()
    started = time.monotonic()
    waited = asyncio.run(store.wait_for_rollouts(rollout_ids=[taken.rollout_id], timeout=30))
    assert len(waited) == 1
    assert time.monotonic() - started < 5
    thread.join()
