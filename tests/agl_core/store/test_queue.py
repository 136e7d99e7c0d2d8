import pytest

from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.types.core import EnqueueRolloutRequest
from tests.agl_core.store.builders import begin, make_resources, take
from tests.agl_core.store.conftest import Clock


def requests(count: int) -> list[EnqueueRolloutRequest]:
    return [EnqueueRolloutRequest(input=number) for number in range(count)]


async def test_rollouts_are_taken_in_the_order_they_were_queued(store: Store):
    many = await store.enqueue_many_rollouts(requests(5))
    last = await store.enqueue_rollout("last")
    order = [(await take(store)).rollout_id for _ in range(6)]
    assert order == [*(rollout.rollout_id for rollout in many), last.rollout_id]
    assert await store.dequeue_rollout() is None


async def test_a_large_batch_keeps_its_order(store: Store):
    many = await store.enqueue_many_rollouts(requests(1200))
    assert [rollout.input for rollout in many] == list(range(1200))
    taken = await store.dequeue_many_rollouts(limit=2000)
    assert [rollout.input for rollout in taken] == list(range(1200))


async def test_taking_many_gives_at_most_the_limit(store: Store):
    await store.enqueue_many_rollouts(requests(5))
    assert await store.dequeue_many_rollouts(limit=0) == []
    assert await store.dequeue_many_rollouts(limit=-1) == []
    assert len(await store.dequeue_many_rollouts(limit=3)) == 3
    assert len(await store.dequeue_many_rollouts(limit=3)) == 2
    assert await store.dequeue_many_rollouts(limit=3) == []


async def test_a_taken_rollout_is_prepared_and_has_an_attempt(store: Store, clock: Clock):
    await store.enqueue_rollout("task")
    clock.sleep(3)
    taken = await take(store, "w")
    assert taken.status == "preparing"
    assert taken == await store.get_rollout_by_id(taken.rollout_id)
    attempt = taken.attempt
    assert (attempt.sequence_id, attempt.worker_id, attempt.status) == (1, "w", "preparing")
    assert attempt.start_time == clock.now


@pytest.mark.parametrize("status", ["cancelled", "failed", "succeeded"])
async def test_a_rollout_that_was_changed_meanwhile_is_not_taken(store: Store, status: str):
    first = await store.enqueue_rollout(1)
    await store.enqueue_rollout(2)
    await store.update_rollout(first.rollout_id, status=status)  # pyright: ignore[reportArgumentType]
    assert (await take(store)).input == 2
    assert await store.dequeue_rollout() is None


async def test_a_rollout_queued_again_by_hand_gets_attempt_two(store: Store):
    taken = await begin(store)
    other = await store.enqueue_rollout("other")
    await store.update_rollout(taken.rollout_id, status="requeuing")
    old = await store.get_latest_attempt(taken.rollout_id)
    assert old is not None
    assert old.status == "cancelled"
    assert (await take(store)).rollout_id == other.rollout_id
    again = await take(store)
    assert (again.rollout_id, again.attempt.sequence_id) == (taken.rollout_id, 2)


async def test_queueing_twice_keeps_the_place(store: Store):
    first = await store.enqueue_rollout(1)
    await store.enqueue_rollout(2)
    await store.update_rollout(first.rollout_id, status="requeuing")
    await store.update_rollout(first.rollout_id, status="requeuing")
    assert [(await take(store)).input for _ in range(2)] == [1, 2]
    assert await store.dequeue_rollout() is None


# Repeated calls.


async def test_a_repeated_enqueue_queues_once(store: Store):
    first = await store.enqueue_many_rollouts(requests(3), idempotency_key="k")
    again = await store.enqueue_many_rollouts(requests(3), idempotency_key="k")
    assert list(again) == list(first)
    assert (await store.query_rollouts()).total == 3
    single = await store.enqueue_rollout("task", idempotency_key="one")
    assert await store.enqueue_rollout("task", idempotency_key="one") == single


async def test_keys_belong_to_their_operation(store: Store):
    await store.enqueue_rollout("task", idempotency_key="k")
    started = await store.start_rollout("task", idempotency_key="k")
    assert await store.start_rollout("task", idempotency_key="k") == started
    added = await store.add_resources(make_resources(), idempotency_key="k")
    assert await store.add_resources(make_resources(), idempotency_key="k") == added
    counts = await store.statistics()
    assert (counts.get("total_rollouts"), counts.get("total_resources")) == (2, 1)


async def test_a_lost_answer_to_a_dequeue_is_given_again(store: Store):
    await store.enqueue_many_rollouts(requests(3))
    lost = await store.dequeue_many_rollouts(limit=2, worker_id="w", idempotency_key="k")
    again = await store.dequeue_many_rollouts(limit=2, worker_id="w", idempotency_key="k")
    assert [r.attempt.attempt_id for r in again] == [r.attempt.attempt_id for r in lost]
    assert (await store.statistics()).get("total_attempts") == 2
    assert (await take(store)).input == 2


async def test_a_repeated_dequeue_leaves_out_attempts_that_have_ended(store: Store):
    await store.enqueue_many_rollouts(requests(2))
    first, second = await store.dequeue_many_rollouts(limit=2, idempotency_key="k")
    await store.update_rollout(first.rollout_id, status="cancelled")
    again = await store.dequeue_many_rollouts(limit=2, idempotency_key="k")
    assert [rollout.rollout_id for rollout in again] == [second.rollout_id]


async def test_an_empty_answer_is_not_kept(store: Store):
    assert await store.dequeue_rollout(idempotency_key="k") is None
    await store.enqueue_rollout("task")
    assert await store.dequeue_rollout(idempotency_key="k") is not None


async def test_keys_are_forgotten_after_an_hour(store: Store, clock: Clock):
    await store.enqueue_rollout("task", idempotency_key="k")
    clock.sleep(3601)
    await store.enqueue_rollout("task", idempotency_key="other")
    await store.enqueue_rollout("task", idempotency_key="k")
    assert (await store.query_rollouts()).total == 3
