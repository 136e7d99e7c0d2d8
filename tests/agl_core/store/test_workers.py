import pytest

from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.types.core import Worker
from tests.agl_core.store.builders import begin
from tests.agl_core.store.conftest import Clock


async def known(store: Store, worker_id: str) -> Worker:
    worker = await store.get_worker_by_id(worker_id)
    assert worker is not None
    return worker


async def test_a_heartbeat_makes_a_worker_known(store: Store, clock: Clock):
    assert await store.get_worker_by_id("w") is None
    worker = await store.update_worker("w", {"cpu": 0.5})
    assert worker == Worker(
        worker_id="w", heartbeat_stats={"cpu": 0.5}, last_heartbeat_time=clock.now
    )
    clock.sleep(1)
    worker = await store.update_worker("w")
    assert (worker.heartbeat_stats, worker.last_heartbeat_time) == ({"cpu": 0.5}, clock.now)


async def test_a_worker_is_busy_from_dequeue_to_result(store: Store, clock: Clock):
    await store.update_worker("w", {"cpu": 1})
    clock.sleep(1)
    taken = await begin(store)
    busy = await known(store, "w")
    assert (busy.status, busy.current_rollout_id) == ("busy", taken.rollout_id)
    assert busy.current_attempt_id == taken.attempt.attempt_id
    assert (busy.last_dequeue_time, busy.last_busy_time) == (clock.now, clock.now)
    assert (busy.heartbeat_stats, busy.last_heartbeat_time) == ({"cpu": 1}, clock.now - 1)
    clock.sleep(1)
    await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
    idle = await known(store, "w")
    assert (idle.status, idle.current_rollout_id) == ("idle", None)
    assert (idle.current_attempt_id, idle.last_idle_time) == (None, clock.now)


async def test_an_empty_queue_makes_a_worker_idle_since_then(store: Store, clock: Clock):
    assert await store.dequeue_rollout("w") is None
    idle_since = clock.now
    clock.sleep(5)
    assert await store.dequeue_rollout("w") is None
    worker = await known(store, "w")
    assert (worker.status, worker.last_idle_time) == ("idle", idle_since)
    assert worker.last_dequeue_time == clock.now


async def test_attempts_begun_by_hand_are_assigned(store: Store):
    started = await store.start_rollout("task", worker_id="w1")
    assert (await known(store, "w1")).current_rollout_id == started.rollout_id
    again = await store.start_attempt(started.rollout_id, worker_id="w2")
    assert (await known(store, "w2")).current_attempt_id == again.attempt.attempt_id


async def test_a_worker_with_several_attempts_is_busy_until_the_last_ends(store: Store):
    first, second = await begin(store), await begin(store)
    await store.update_attempt(second.rollout_id, "latest", status="succeeded")
    worker = await known(store, "w")
    assert (worker.status, worker.current_attempt_id) == ("busy", first.attempt.attempt_id)
    await store.update_attempt(first.rollout_id, "latest", status="failed")
    assert (await known(store, "w")).status == "idle"


async def test_a_worker_whose_older_attempt_ends_goes_on_with_the_newer(store: Store):
    first, second = await begin(store), await begin(store)
    await store.update_attempt(first.rollout_id, "latest", status="succeeded")
    worker = await known(store, "w")
    assert (worker.status, worker.current_attempt_id) == ("busy", second.attempt.attempt_id)


async def test_the_older_attempt_of_a_worker_ends_without_a_change_of_its_current_one(store: Store):
    first, second, third = await begin(store), await begin(store), await begin(store)
    await store.update_attempt(second.rollout_id, "latest", worker_id="w")
    await store.update_attempt(first.rollout_id, "latest", status="succeeded")
    worker = await known(store, "w")
    assert worker.current_attempt_id == second.attempt.attempt_id != third.attempt.attempt_id


async def test_a_worker_keeps_its_attempt_though_the_queue_is_empty(store: Store, clock: Clock):
    taken = await begin(store)
    assert await store.dequeue_rollout("w") is None
    worker = await known(store, "w")
    assert (worker.status, worker.current_attempt_id) == ("busy", taken.attempt.attempt_id)
    for _ in range(8):
        clock.sleep(10)
        await store.update_worker("w")
    attempt = await store.get_latest_attempt(taken.rollout_id)
    assert attempt is not None
    assert attempt.status == "preparing"


async def test_a_worker_keeps_an_attempt_when_another_times_out(store: Store, clock: Clock):
    kept = await begin(store)
    await begin(store, timeout_seconds=5)
    clock.sleep(6)
    worker = await known(store, "w")
    assert (worker.status, worker.current_attempt_id) == ("busy", kept.attempt.attempt_id)


async def test_an_attempt_given_to_another_worker_leaves_the_first_idle(store: Store):
    taken = await begin(store, "w1")
    ids = (taken.rollout_id, taken.attempt.attempt_id)
    await store.update_attempt(*ids, worker_id="w2")
    first, second = await known(store, "w1"), await known(store, "w2")
    assert (first.status, first.current_attempt_id) == ("idle", None)
    assert (second.status, second.current_attempt_id) == ("busy", taken.attempt.attempt_id)


async def test_a_worker_has_to_stop_what_is_another_ones(store: Store, clock: Clock):
    taken = await begin(store)
    ids = (taken.rollout_id, taken.attempt.attempt_id)
    clock.sleep(50)
    assert await store.renew_leases("other", [ids]) == [ids[1]]
    assert (await known(store, "other")).status == "unknown"
    clock.sleep(11)
    attempt = await store.get_latest_attempt(taken.rollout_id)
    assert attempt is not None
    assert attempt.status == "unresponsive"


async def test_an_attempt_without_a_worker_is_of_the_first_that_renews_it(store: Store):
    started = await store.start_rollout("task")
    ids = (started.rollout_id, started.attempt.attempt_id)
    assert await store.renew_leases("w", [ids]) == []
    assert await store.renew_leases("other", [ids]) == [ids[1]]
    assert (await known(store, "w")).current_attempt_id == ids[1]
    await store.update_attempt(*ids, status="succeeded")
    assert (await known(store, "w")).status == "idle"


@pytest.mark.parametrize("status", ["timeout", "unresponsive"])
async def test_a_worker_that_fell_silent_is_unknown(store: Store, status: str):
    taken = await begin(store)
    await store.update_attempt(taken.rollout_id, "latest", status=status)  # pyright: ignore[reportArgumentType]
    worker = await known(store, "w")
    assert (worker.status, worker.current_attempt_id) == ("unknown", None)


async def test_workers_are_found_by_status_and_name(store: Store, clock: Clock):
    await begin(store, "gpu-1")
    clock.sleep(1)
    await store.dequeue_rollout("gpu-2")
    clock.sleep(1)
    await store.update_worker("cpu-1")

    async def found(**arguments: object) -> list[str]:
        page = await store.query_workers(**arguments)  # pyright: ignore[reportArgumentType]
        return [worker.worker_id for worker in page]

    assert await found() == ["gpu-1", "gpu-2", "cpu-1"]
    assert await found(status_in=["busy", "idle"]) == ["gpu-1", "gpu-2"]
    assert await found(worker_id_contains="-1") == ["gpu-1", "cpu-1"]
    assert await found(worker_id_contains="-1", status_in=["unknown"]) == ["cpu-1"]
    either = {"worker_id_contains": "cpu", "status_in": ["busy"], "filter_logic": "or"}
    assert await found(**either) == ["gpu-1", "cpu-1"]
    assert await found(sort_by="last_dequeue_time") == ["cpu-1", "gpu-1", "gpu-2"]
    assert await found(sort_by="worker_id", limit=1, offset=1) == ["gpu-1"]
    assert (await store.query_workers(limit=0)).total == 3
    with pytest.raises(ValueError, match=r"allowed fields are: .*worker_id"):
        await found(sort_by="heartbeat_stats")
