import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from agl_core.store import InMemoryLightningStore
from tests.agl_core.store.builders import begin, make_span

OpenMemory = Callable[..., InMemoryLightningStore]


@pytest.fixture
async def open_memory() -> AsyncGenerator[OpenMemory]:
    opened: list[InMemoryLightningStore] = []

    def open_one(**settings: object) -> InMemoryLightningStore:
        opened.append(InMemoryLightningStore(**settings))  # pyright: ignore[reportArgumentType]
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()


def small(open_memory: OpenMemory) -> InMemoryLightningStore:
    """A store for 100 bytes of spans that take 10 each."""
    return open_memory(
        eviction_memory_threshold=100, safe_memory_threshold=50, span_size_estimator=lambda _: 10
    )


async def rollout_with_spans(
    store: InMemoryLightningStore, spans: int, *, finished: bool = True, read: bool = True
) -> str:
    taken = await begin(store)
    await store.add_many_spans([make_span(taken, number) for number in range(1, spans + 1)])
    if finished:
        await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
    if read:
        await store.query_spans(taken.rollout_id)
    return taken.rollout_id


async def held(store: InMemoryLightningStore) -> tuple[int | None, int | None]:
    counts = await store.statistics()
    return counts.get("total_spans"), counts.get("total_span_bytes")


async def test_the_oldest_used_spans_go_until_the_rest_fits(open_memory: OpenMemory):
    store = small(open_memory)
    rollouts = [await rollout_with_spans(store, 3) for _ in range(3)]
    assert await held(store) == (9, 90)
    newest = await rollout_with_spans(store, 2)
    assert await held(store) == (5, 50)
    for rollout_id in rollouts[:2]:
        with pytest.raises(RuntimeError, match=f"Spans for rollout {rollout_id} have been evicted"):
            await store.query_spans(rollout_id)
    assert (await store.query_spans(rollouts[2])).total == 3
    assert (await store.query_spans(newest)).total == 2


async def test_spans_in_use_are_never_evicted(
    open_memory: OpenMemory, caplog: pytest.LogCaptureFixture
):
    store = small(open_memory)
    running = await rollout_with_spans(store, 6, finished=False)
    unread = await rollout_with_spans(store, 6, read=False)
    with caplog.at_level(logging.WARNING):
        last = await rollout_with_spans(store, 6, read=False)
    assert await held(store) == (18, 180)
    assert "none of them may be evicted" in caplog.text
    for rollout_id in (running, unread, last):
        assert (await store.query_spans(rollout_id)).total == 6


async def test_a_part_of_the_spans_is_not_all_of_them(open_memory: OpenMemory):
    store = small(open_memory)
    rollout_id = await rollout_with_spans(store, 6, read=False)
    await store.query_spans(rollout_id, limit=1)
    await store.query_spans(rollout_id, name="step")
    await rollout_with_spans(store, 6, read=False)
    assert await held(store) == (12, 120)
    await store.query_spans(rollout_id, "latest")
    await rollout_with_spans(store, 1)
    assert await held(store) == (7, 70)


async def test_spans_that_come_after_an_eviction_are_not_taken_for_all(open_memory: OpenMemory):
    store = small(open_memory)
    taken = await begin(store)
    await store.add_many_spans([make_span(taken, number) for number in range(1, 9)])
    await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
    await store.query_spans(taken.rollout_id)
    await rollout_with_spans(store, 4)
    with pytest.raises(RuntimeError, match="have been evicted"):
        await store.query_spans(taken.rollout_id)
    await store.add_span(make_span(taken, 20))
    assert await held(store) == (5, 50)
    for question in ({}, {"attempt_id": "latest"}, {"name": "step"}, {"limit": 1}):
        with pytest.raises(RuntimeError, match="have been evicted"):
            await store.query_spans(taken.rollout_id, **question)
    await rollout_with_spans(store, 6)
    assert (await held(store))[0] == 6


async def test_a_span_that_comes_after_the_reading_is_not_evicted(open_memory: OpenMemory):
    store = small(open_memory)
    taken = await begin(store)
    await store.add_span(make_span(taken, 1))
    await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
    await store.query_spans(taken.rollout_id)
    await store.add_span(make_span(taken, 2))
    await rollout_with_spans(store, 10, finished=False)
    assert (await store.query_spans(taken.rollout_id)).total == 2
    await rollout_with_spans(store, 1, finished=False)
    with pytest.raises(RuntimeError, match="have been evicted"):
        await store.query_spans(taken.rollout_id)


async def test_a_span_that_comes_while_others_are_read_is_not_evicted(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
):
    store = small(open_memory)
    taken = await begin(store)
    await store.add_span(make_span(taken, 1))
    await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
    note = store._spans_were_read  # pyright: ignore[reportPrivateUsage]

    def one_more_before(*arguments: Any) -> None:
        store._add_spans([make_span(taken, 2)])  # pyright: ignore[reportPrivateUsage]
        note(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_spans_were_read", one_more_before)
        assert (await store.query_spans(taken.rollout_id)).total == 1
    await rollout_with_spans(store, 10, finished=False)
    assert (await store.query_spans(taken.rollout_id)).total == 2


async def test_reading_one_attempt_uses_no_other(open_memory: OpenMemory):
    store = small(open_memory)
    first = await begin(store)
    await store.add_span(make_span(first, 1))
    second = await store.start_attempt(first.rollout_id)
    await store.add_span(make_span(second, 2))
    await store.update_attempt(first.rollout_id, "latest", status="succeeded")
    assert (await store.query_spans(first.rollout_id, "latest")).total == 1
    await rollout_with_spans(store, 10, finished=False)
    for evicted in ("latest", None):
        with pytest.raises(RuntimeError, match="have been evicted"):
            await store.query_spans(first.rollout_id, evicted)
    kept = await store.query_spans(first.rollout_id, first.attempt.attempt_id)
    assert [span.sequence_id for span in kept] == [1]


async def test_a_safe_threshold_of_zero_lets_go_of_all(open_memory: OpenMemory):
    store = open_memory(
        eviction_memory_threshold=50, safe_memory_threshold=0.0, span_size_estimator=lambda _: 10
    )
    for _ in range(3):
        await rollout_with_spans(store, 2)
    assert await held(store) == (2, 20)


async def test_the_size_of_a_span_is_that_of_its_json(open_memory: OpenMemory):
    store = open_memory()
    taken = await begin(store)
    await store.add_span(make_span(taken, attributes={"text": ["x" * 10_000], "n": {"a": 1}}))
    _, size = await held(store)
    assert size is not None
    assert 10_000 < size < 11_000


async def test_thresholds_are_bytes_or_shares_of_the_memory(open_memory: OpenMemory):
    counts = await open_memory().statistics()
    capacity = counts.get("memory_capacity_bytes")
    evict, safe = counts.get("eviction_threshold_bytes"), counts.get("safe_threshold_bytes")
    assert capacity is not None
    assert evict == int(0.7 * capacity)
    assert safe == int(0.8 * evict)
    counts = await open_memory(
        eviction_memory_threshold=0.5, safe_memory_threshold=0.25
    ).statistics()
    assert counts.get("eviction_threshold_bytes") == int(0.5 * capacity)
    assert counts.get("safe_threshold_bytes") == int(0.25 * capacity)


@pytest.mark.parametrize(
    ("evict", "safe", "message"),
    [
        (100, 100, "safe_memory_threshold is 100 bytes, not below"),
        (0.5, 0.6, "not below"),
        (-1, None, "eviction_memory_threshold is -1"),
        (1.5, None, "eviction_memory_threshold is 1.5"),
        (100, -0.1, "safe_memory_threshold is -0.1"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(evict: float, safe: float | None, message: str):
    with pytest.raises(ValueError, match=message):
        InMemoryLightningStore(eviction_memory_threshold=evict, safe_memory_threshold=safe)
