import pytest

from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.types.core import AttemptStatus, RolloutStatus
from agl_core.types.outcome import FailureKind
from tests.agl_core.store.builders import begin, make_span, take
from tests.agl_core.store.conftest import Clock


async def status_of(store: Store, rollout_id: str) -> RolloutStatus:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status


async def test_attempts_are_listed_in_order_and_paged(store: Store):
    taken = await begin(store)
    for _ in range(2):
        await store.start_attempt(taken.rollout_id)
    attempts = await store.query_attempts(taken.rollout_id)
    assert [attempt.sequence_id for attempt in attempts] == [1, 2, 3]
    page = await store.query_attempts(taken.rollout_id, sort_order="desc", limit=1, offset=1)
    assert [attempt.sequence_id for attempt in page] == [2]
    assert page.total == 3
    assert (await store.query_attempts("ro-unknown")).total == 0
    with pytest.raises(ValueError, match=r"allowed fields are: .*worker_id"):
        await store.query_attempts(taken.rollout_id, sort_by="nothing")


async def test_fields_of_an_attempt_change_alone(store: Store):
    taken = await begin(store, worker_id=None)
    attempt = await store.update_attempt(
        taken.rollout_id, taken.attempt.attempt_id, worker_id="w2", metadata={"a": 1}
    )
    assert (attempt.worker_id, attempt.metadata, attempt.status) == ("w2", {"a": 1}, "preparing")
    cleared = await store.update_attempt(taken.rollout_id, "latest", metadata=None)
    assert (cleared.metadata, cleared.worker_id) == (None, "w2")
    seen = await store.update_attempt(taken.rollout_id, "latest", last_heartbeat_time=1_000_010.0)
    assert seen.last_heartbeat_time == 1_000_010.0
    worker = await store.get_worker_by_id("w2")
    assert worker is not None
    assert worker.current_attempt_id == attempt.attempt_id


async def test_what_is_not_found_is_named(store: Store):
    with pytest.raises(ValueError, match="Rollout ro-0 not found"):
        await store.update_attempt("ro-0", "latest", status="failed")
    with pytest.raises(ValueError, match="Rollout ro-0 not found"):
        await store.update_attempt("ro-0", "at-0", status="failed")
    with pytest.raises(ValueError, match="Rollout ro-0 not found"):
        await store.start_attempt("ro-0")
    queued = await store.enqueue_rollout("task")
    with pytest.raises(ValueError, match=f"No attempts found for rollout {queued.rollout_id}"):
        await store.update_attempt(queued.rollout_id, "latest", status="failed")
    with pytest.raises(ValueError, match="Attempt at-0 not found"):
        await store.update_attempt(queued.rollout_id, "at-0", status="failed")


async def test_an_unknown_status_and_a_step_back_are_refused(store: Store):
    taken = await begin(store)
    with pytest.raises(ValueError, match="Invalid attempt status: done"):
        await store.update_attempt(taken.rollout_id, "latest", status="done")  # pyright: ignore[reportArgumentType]
    await store.update_attempt(taken.rollout_id, "latest", status="running")
    with pytest.raises(ValueError, match="cannot go from running to preparing"):
        await store.update_attempt(taken.rollout_id, "latest", status="preparing")


@pytest.mark.parametrize(
    ("status", "rollout_status"),
    [
        ("running", "running"),
        ("succeeded", "succeeded"),
        ("failed", "failed"),
        ("timeout", "failed"),
        ("unresponsive", "failed"),
        ("cancelled", "cancelled"),
    ],
)
async def test_the_latest_attempt_decides_the_rollout(
    store: Store, clock: Clock, status: AttemptStatus, rollout_status: RolloutStatus
):
    taken = await begin(store)
    clock.sleep(1)
    attempt = await store.update_attempt(taken.rollout_id, "latest", status=status)
    rollout = await store.get_rollout_by_id(taken.rollout_id)
    assert rollout is not None
    end = None if status == "running" else clock.now
    assert (attempt.status, attempt.end_time) == (status, end)
    assert (rollout.status, rollout.end_time) == (rollout_status, end)


async def test_an_older_attempt_decides_nothing(store: Store):
    taken = await begin(store)
    newer = await store.start_attempt(taken.rollout_id)
    old = await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="failed")
    assert old.status == "failed"
    assert await status_of(store, taken.rollout_id) == "preparing"
    await store.add_span(make_span(newer))
    assert await status_of(store, taken.rollout_id) == "running"


async def test_start_attempt_counts_on_whatever_max_attempts_says(store: Store):
    taken = await begin(store, max_attempts=1)
    again = await store.start_attempt(taken.rollout_id, worker_id="w2")
    assert (again.attempt.sequence_id, again.status) == (2, "preparing")
    worker = await store.get_worker_by_id("w2")
    assert worker is not None
    assert worker.current_rollout_id == taken.rollout_id
    await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
    with pytest.raises(ValueError, match="cannot go from succeeded to preparing"):
        await store.start_attempt(taken.rollout_id)


async def test_start_attempt_takes_a_queued_rollout_out_of_the_queue(store: Store):
    queued = await store.enqueue_rollout("task")
    await store.start_attempt(queued.rollout_id)
    assert await store.dequeue_rollout() is None


async def test_a_failed_attempt_is_retried_until_max_attempts(store: Store):
    taken = await begin(store, max_attempts=2, retry_condition=["failed"])
    await store.update_attempt(
        taken.rollout_id,
        "latest",
        status="failed",
        failure_kind=FailureKind.AGENT_ERROR,
        failure_message="boom",
    )
    assert await status_of(store, taken.rollout_id) == "requeuing"
    again = await take(store)
    assert (again.rollout_id, again.attempt.sequence_id) == (taken.rollout_id, 2)
    await store.update_attempt(taken.rollout_id, "latest", status="failed")
    assert await status_of(store, taken.rollout_id) == "failed"
    first, _ = await store.query_attempts(taken.rollout_id)
    assert (first.failure_kind, first.failure_message) == (FailureKind.AGENT_ERROR, "boom")


@pytest.mark.parametrize("end", ["succeeded", "failed", "timeout", "cancelled"])
async def test_the_end_of_an_attempt_is_final(store: Store, end: AttemptStatus):
    taken = await begin(store, max_attempts=2, retry_condition=["failed", "timeout"])
    ended = await store.update_attempt(taken.rollout_id, "latest", status=end)
    before = await status_of(store, taken.rollout_id)
    for status in ("running", "succeeded", "failed", "unresponsive"):
        late = await store.update_attempt(
            taken.rollout_id, "latest", status=status, failure_message="late"
        )
        assert (late.status, late.end_time) == (end, ended.end_time)
        assert late.failure_message == ended.failure_message
    await store.add_span(make_span(taken))
    latest = await store.get_latest_attempt(taken.rollout_id)
    assert latest is not None
    assert latest.status == end
    assert latest.last_heartbeat_time is not None
    assert await status_of(store, taken.rollout_id) == before


# A rollout queued again because its attempt fell silent.


async def fell_silent(store: Store, clock: Clock):
    taken = await begin(
        store, max_attempts=2, retry_condition=["unresponsive"], unresponsive_seconds=5
    )
    clock.sleep(6)
    assert await status_of(store, taken.rollout_id) == "requeuing"
    return taken


async def test_a_late_span_brings_a_silent_attempt_back(store: Store, clock: Clock):
    taken = await fell_silent(store, clock)
    await store.add_span(make_span(taken))
    assert await status_of(store, taken.rollout_id) == "running"
    attempt = await store.get_latest_attempt(taken.rollout_id)
    assert attempt is not None
    assert (attempt.status, attempt.end_time) == ("running", None)
    assert (attempt.failure_kind, attempt.failure_message) == (None, None)
    assert await store.dequeue_rollout() is None
    clock.sleep(6)
    assert await status_of(store, taken.rollout_id) == "requeuing"


async def test_a_late_heartbeat_brings_it_back_too(store: Store, clock: Clock):
    taken = await fell_silent(store, clock)
    assert await store.renew_leases("w", [(taken.rollout_id, taken.attempt.attempt_id)]) == []
    assert await status_of(store, taken.rollout_id) == "running"


@pytest.mark.parametrize("end", ["succeeded", "failed"])
async def test_a_late_result_counts_without_another_attempt(
    store: Store, clock: Clock, end: AttemptStatus
):
    taken = await fell_silent(store, clock)
    await store.update_attempt(taken.rollout_id, "latest", status=end)
    assert await status_of(store, taken.rollout_id) == end
    assert await store.dequeue_rollout() is None


async def test_once_another_attempt_began_the_silent_one_is_too_late(store: Store, clock: Clock):
    taken = await fell_silent(store, clock)
    again = await take(store, "w2")
    late = await store.update_attempt(
        taken.rollout_id, taken.attempt.attempt_id, status="succeeded"
    )
    assert late.status == "unresponsive"
    assert await store.add_span(make_span(taken)) is not None
    pair = (taken.rollout_id, taken.attempt.attempt_id)
    assert await store.renew_leases("w", [pair]) == [taken.attempt.attempt_id]
    latest = await store.get_latest_attempt(taken.rollout_id)
    assert latest is not None
    assert (latest.attempt_id, latest.status) == (again.attempt.attempt_id, "preparing")
    assert await status_of(store, taken.rollout_id) == "preparing"
    assert (await store.query_spans(taken.rollout_id)).total == 1
