import asyncio
import gc
import threading
import time

import pytest

from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.store import InMemoryLightningStore
from agl_core.store.attempt_table import Deadlines
from agl_core.types.core import Attempt, RolloutConfig
from agl_core.types.outcome import FailureKind
from tests.agl_core.store.builders import begin, make_span, take
from tests.agl_core.store.conftest import Clock, OpenStore


async def latest(store: Store, rollout_id: str) -> Attempt:
    attempt = await store.get_latest_attempt(rollout_id)
    assert attempt is not None
    return attempt


async def test_an_attempt_past_its_limit_times_out_and_says_so(store: Store, clock: Clock):
    taken = await begin(store, timeout_seconds=10)
    for _ in range(5):
        clock.sleep(1.9)
        await store.renew_leases("w", [(taken.rollout_id, taken.attempt.attempt_id)])
    assert (await latest(store, taken.rollout_id)).status == "preparing"
    clock.sleep(1)
    attempt = await latest(store, taken.rollout_id)
    assert (attempt.status, attempt.end_time) == ("timeout", clock.now)
    assert attempt.failure_kind == FailureKind.TIMEOUT
    assert attempt.failure_message == "no result within 10 s"
    rollout = await store.get_rollout_by_id(taken.rollout_id)
    assert rollout is not None
    assert (rollout.status, rollout.end_time) == ("failed", clock.now)
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("unknown", None)


async def test_a_silent_worker_loses_its_attempt_by_default(store: Store, clock: Clock):
    taken = await begin(store)
    clock.sleep(59)
    assert (await latest(store, taken.rollout_id)).status == "preparing"
    clock.sleep(2)
    attempt = await latest(store, taken.rollout_id)
    assert attempt.status == "unresponsive"
    assert attempt.failure_message == "no sign of life from w for 60 s"


async def test_an_attempt_ends_after_an_hour_by_default(store: Store, clock: Clock):
    taken = await begin(store)
    for _ in range(119):
        clock.sleep(30)
        await store.renew_leases("w", [(taken.rollout_id, taken.attempt.attempt_id)])
    assert (await latest(store, taken.rollout_id)).status == "preparing"
    clock.sleep(31)
    assert (await latest(store, taken.rollout_id)).status == "timeout"


async def test_defaults_are_settings(open_store: OpenStore, clock: Clock):
    deadlines = Deadlines(lease_seconds=3, timeout_seconds=7)
    store = open_store(clock=clock, scan_debounce_seconds=0, deadlines=deadlines)
    silent = await begin(store)
    started = await store.start_rollout("by hand")
    clock.sleep(4)
    assert (await latest(store, silent.rollout_id)).status == "unresponsive"
    assert (await latest(store, started.rollout_id)).status == "preparing"
    clock.sleep(4)
    assert (await latest(store, started.rollout_id)).status == "timeout"


@pytest.mark.parametrize("sign", ["renew_leases", "update_worker", "span", "status", "time"])
async def test_every_sign_of_life_renews_the_lease(store: Store, clock: Clock, sign: str):
    taken = await begin(store)
    rollout_id, attempt_id = taken.rollout_id, taken.attempt.attempt_id
    for number in range(3):
        clock.sleep(50)
        if sign == "renew_leases":
            assert await store.renew_leases("w", [(rollout_id, attempt_id)]) == []
        elif sign == "update_worker":
            await store.update_worker("w")
        elif sign == "span":
            await store.add_span(make_span(taken, number))
        elif sign == "status":
            await store.update_attempt(rollout_id, attempt_id, status="running")
        else:
            await store.update_attempt(rollout_id, attempt_id, last_heartbeat_time=clock.now)
        assert (await latest(store, rollout_id)).last_heartbeat_time == clock.now
    clock.sleep(61)
    assert (await latest(store, rollout_id)).status == "unresponsive"


async def test_a_lease_runs_by_the_stores_clock_not_the_workers(store: Store, clock: Clock):
    taken = await begin(store)
    ids = (taken.rollout_id, taken.attempt.attempt_id)
    await store.update_attempt(*ids, last_heartbeat_time=clock.now - 3600)
    assert (await latest(store, taken.rollout_id)).status == "preparing"
    await store.update_attempt(*ids, last_heartbeat_time=clock.now + 3600)
    clock.sleep(61)
    assert (await latest(store, taken.rollout_id)).status == "unresponsive"


async def test_the_shorter_of_lease_and_config_holds(store: Store, clock: Clock):
    await store.enqueue_rollout("a", config=RolloutConfig(unresponsive_seconds=5))
    await store.enqueue_rollout("b", config=RolloutConfig(unresponsive_seconds=50))
    first, second = await store.dequeue_many_rollouts(limit=2, lease_seconds=20)
    clock.sleep(6)
    assert (await latest(store, first.rollout_id)).status == "unresponsive"
    clock.sleep(15)
    assert (await latest(store, second.rollout_id)).status == "unresponsive"


async def test_who_starts_a_rollout_without_a_worker_may_be_silent(store: Store, clock: Clock):
    started = await store.start_rollout("task")
    by_worker = await store.start_rollout("task", worker_id="w")
    limited = await store.start_rollout("task", config=RolloutConfig(unresponsive_seconds=5))
    clock.sleep(600)
    assert (await latest(store, started.rollout_id)).status == "preparing"
    assert (await latest(store, by_worker.rollout_id)).status == "unresponsive"
    assert (await latest(store, limited.rollout_id)).status == "unresponsive"


async def test_a_dead_workers_rollout_is_taken_by_another(store: Store, clock: Clock):
    taken = await begin(store, max_attempts=2, retry_condition=["unresponsive"])
    clock.sleep(61)
    again = await take(store, "w2")
    assert (again.rollout_id, again.attempt.sequence_id) == (taken.rollout_id, 2)


async def test_a_worker_learns_which_attempts_to_stop(store: Store):
    good, cancelled, superseded, done = [await begin(store) for _ in range(4)]
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    await store.start_attempt(superseded.rollout_id)
    await store.update_attempt(done.rollout_id, "latest", status="succeeded")
    pairs = [(a.rollout_id, a.attempt.attempt_id) for a in (good, cancelled, superseded, done)]
    stop = await store.renew_leases("w", [*pairs, ("ro-0", "at-0")])
    assert stop == [*(attempt_id for _, attempt_id in pairs[1:]), "at-0"]
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert worker.last_heartbeat_time is not None


# The thread that looks by itself, on a real clock.


async def test_deadlines_are_kept_without_any_call(open_store: OpenStore):
    store = open_store(scan_debounce_seconds=0.1)
    taken = await begin(store, timeout_seconds=0.5)
    started = time.monotonic()
    waited = await store.wait_for_rollouts(rollout_ids=[taken.rollout_id], timeout=10)
    assert [rollout.status for rollout in waited] == ["failed"]
    assert 0.4 < time.monotonic() - started < 8
    attempt = await latest(store, taken.rollout_id)
    assert attempt.end_time is not None
    assert attempt.end_time - attempt.start_time < 8


async def test_the_looking_is_debounced(open_store: OpenStore, clock: Clock):
    store = open_store(clock=clock, scan_debounce_seconds=3600)
    taken = await begin(store, timeout_seconds=5)
    clock.sleep(6)
    assert (await latest(store, taken.rollout_id)).status == "preparing"
    with pytest.raises(ValueError, match="below 0"):
        open_store(scan_debounce_seconds=-1)


def watchdogs() -> int:
    return sum(thread.name == "agl-store-watchdog" for thread in threading.enumerate())


@pytest.mark.in_process
async def test_the_thread_starts_with_the_first_call_and_ends_with_close(open_store: OpenStore):
    before = watchdogs()
    store = open_store()
    assert watchdogs() == before
    await begin(store)
    await begin(store)
    assert watchdogs() == before + 1
    await store.close()
    assert watchdogs() == before
    await store.close()
    with pytest.raises(ValueError, match="is closed"):
        await store.enqueue_rollout("task")


async def test_a_store_that_nobody_holds_leaves_no_thread():
    before = watchdogs()
    store = InMemoryLightningStore(scan_debounce_seconds=0.02)
    await begin(store)
    del store
    gc.collect()
    deadline = time.monotonic() + 5
    while watchdogs() > before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
