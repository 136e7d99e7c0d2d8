import math

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.types.tracer import Event, Span, SpanContext
from tests.agl_core.store.builders import begin, make_span
from tests.agl_core.store.conftest import Clock


async def test_a_span_comes_back_as_it_was(store: Store):
    taken = await begin(store)
    context = SpanContext(trace_id="0" * 32, span_id="1" * 16)
    span = make_span(
        taken,
        attributes={
            "ids": [1, 2**63, 3],
            "logprobs": [-0.25, math.inf],
            "none": None,
            "text": "äöü \u0000 'quoted' \U0001f600",
            "nested": {"a": [None, True]},
        },
        parent_id="2" * 16,
    ).model_copy(
        update={
            "events": [Event(name="e", attributes={"x": None}, timestamp=1.5)],
            "context": context,
            "parent": context,
        }
    )
    assert await store.add_span(span) == span
    (kept,) = await store.query_spans(taken.rollout_id)
    assert kept == span


async def test_nan_stays_nan(store: Store):
    taken = await begin(store)
    await store.add_span(make_span(taken, attributes={"reward": math.nan, "n": None}))
    (kept,) = await store.query_spans(taken.rollout_id)
    assert math.isnan(kept.attributes["reward"])
    assert kept.attributes["n"] is None


async def test_fields_that_we_do_not_know_are_kept(store: Store):
    taken = await begin(store)
    span = Span(**make_span(taken).model_dump(), kind="client")
    await store.add_span(span)
    (kept,) = await store.query_spans(taken.rollout_id)
    assert kept == span


async def test_sequence_ids_count_for_each_rollout_across_attempts(store: Store):
    taken = await begin(store)
    other = await begin(store)
    again = await store.start_attempt(taken.rollout_id)
    first = (taken.rollout_id, taken.attempt.attempt_id)
    second = (taken.rollout_id, again.attempt.attempt_id)
    third = (other.rollout_id, other.attempt.attempt_id)
    assert await store.get_next_span_sequence_id(*first) == 1
    assert await store.get_next_span_sequence_id(*second) == 2
    assert await store.get_many_span_sequence_ids([third, first, third, second]) == [1, 3, 2, 4]
    assert await store.get_many_span_sequence_ids([]) == []
    assert await store.get_many_span_sequence_ids([first] * 64) == list(range(5, 69))
    with pytest.raises(ValueError, match="Rollout ro-0 not found"):
        await store.get_next_span_sequence_id("ro-0", "at-0")


async def test_a_span_with_a_higher_sequence_id_raises_the_counter(store: Store):
    taken = await begin(store)
    ids = (taken.rollout_id, taken.attempt.attempt_id)
    await store.add_span(make_span(taken, 10))
    assert await store.get_next_span_sequence_id(*ids) == 11
    await store.add_span(make_span(taken, 3))
    assert await store.get_next_span_sequence_id(*ids) == 12


async def test_opentelemetry_spans_are_kept_with_the_next_sequence_id(store: Store):
    taken = await begin(store)
    ids = (taken.rollout_id, taken.attempt.attempt_id)
    recorded = TracerProvider().get_tracer("t").start_span("work", attributes={"a": 1})
    recorded.end()
    first = await store.add_otel_span(*ids, recorded)  # pyright: ignore[reportArgumentType]
    assert first is not None
    assert (first.sequence_id, first.name, first.attributes) == (1, "work", {"a": 1})
    assert await store.add_otel_span(*ids, recorded, sequence_id=5) is None  # pyright: ignore[reportArgumentType]


async def test_a_span_id_is_kept_once_for_each_attempt(store: Store):
    taken = await begin(store)
    span = make_span(taken, 1)
    assert await store.add_span(span) == span
    assert await store.add_span(span) is None
    new = make_span(taken, 2)
    assert await store.add_many_spans([span, new, new]) == [new]
    assert [kept.sequence_id for kept in await store.query_spans(taken.rollout_id)] == [1, 2]
    again = await store.start_attempt(taken.rollout_id)
    assert await store.add_span(make_span(again, 3, span_id=span.span_id)) is not None


async def test_spans_of_several_rollouts_come_in_one_call(store: Store):
    first, second = await begin(store), await begin(store)
    spans = [make_span(first, 1), make_span(second, 1), make_span(first, 2)]
    assert await store.add_many_spans(spans) == spans
    assert (await store.query_spans(first.rollout_id)).total == 2
    assert (await store.query_spans(second.rollout_id)).total == 1
    assert await store.add_many_spans([]) == []


async def test_a_span_of_something_unknown_is_refused_with_its_whole_batch(store: Store):
    taken = await begin(store)
    good = make_span(taken)
    with pytest.raises(ValueError, match="Rollout ro-0 not found"):
        await store.add_many_spans([good, good.model_copy(update={"rollout_id": "ro-0"})])
    with pytest.raises(ValueError, match="Attempt at-0 not found"):
        await store.add_many_spans([good, good.model_copy(update={"attempt_id": "at-0"})])
    assert (await store.query_spans(taken.rollout_id)).total == 0
    rollout = await store.get_rollout_by_id(taken.rollout_id)
    assert rollout is not None
    assert rollout.status == "preparing"


async def test_the_first_span_makes_attempt_and_rollout_running(store: Store, clock: Clock):
    taken = await begin(store)
    clock.sleep(2)
    await store.add_span(make_span(taken))
    attempt = await store.get_latest_attempt(taken.rollout_id)
    rollout = await store.get_rollout_by_id(taken.rollout_id)
    assert attempt is not None
    assert rollout is not None
    assert (attempt.status, rollout.status) == ("running", "running")
    assert attempt.last_heartbeat_time == clock.now
    clock.sleep(2)
    await store.update_attempt(taken.rollout_id, "latest", metadata={"kept": True})
    await store.add_span(make_span(taken, 2))
    later = await store.get_latest_attempt(taken.rollout_id)
    assert later == attempt.model_copy(
        update={"last_heartbeat_time": clock.now, "metadata": {"kept": True}}
    )


async def test_spans_are_found_by_what_they_say(store: Store):
    taken = await begin(store)
    other = await begin(store)
    trace, root = "a" * 32, "b" * 16
    spans = [
        make_span(taken, 1, name="agent", trace_id=trace, span_id=root),
        make_span(taken, 2, name="llm.chat", trace_id=trace, span_id="c" * 16, parent_id=root),
        make_span(taken, 3, name="tool.search", trace_id="d" * 32, span_id="e" * 16),
    ]
    await store.add_many_spans(spans)
    await store.add_span(make_span(other, 1, name="llm.chat", trace_id=trace, span_id=root))

    async def found(**conditions: object) -> list[int]:
        page = await store.query_spans(taken.rollout_id, **conditions)  # pyright: ignore[reportArgumentType]
        return [span.sequence_id for span in page]

    assert await found(trace_id=trace) == [1, 2]
    assert await found(trace_id_contains="dd") == [3]
    assert await found(span_id=root) == [1]
    assert await found(span_id_contains="cc") == [2]
    assert await found(parent_id=root) == [2]
    assert await found(parent_id_contains="bb") == [2]
    assert await found(name="agent") == [1]
    assert await found(name_contains="l") == [2, 3]
    assert await found(name_contains="llm", trace_id="d" * 32) == []
    assert await found(name_contains="llm", trace_id="d" * 32, filter_logic="or") == [2, 3]
    assert await found(sort_by="name", sort_order="desc", limit=2) == [3, 2]
    assert await found(offset=5) == []
    assert await found(limit=0) == []


async def test_spans_are_found_by_attempt(store: Store):
    taken = await begin(store)
    await store.add_span(make_span(taken, 1))
    again = await store.start_attempt(taken.rollout_id)
    await store.add_span(make_span(again, 2))
    rollout_id = taken.rollout_id
    assert [s.sequence_id for s in await store.query_spans(rollout_id)] == [1, 2]
    assert [s.sequence_id for s in await store.query_spans(rollout_id, "latest")] == [2]
    old = await store.query_spans(rollout_id, taken.attempt.attempt_id)
    assert [s.sequence_id for s in old] == [1]
    queued = await store.enqueue_rollout("task")
    assert (await store.query_spans(queued.rollout_id, "latest")).total == 0
    assert (await store.query_spans("ro-0", "latest")).total == 0


async def test_equal_sequence_ids_stay_in_order_of_arrival(store: Store):
    taken = await begin(store)
    spans = [make_span(taken, 1, name=name) for name in "cab"]
    await store.add_many_spans(spans)
    assert [span.name for span in await store.query_spans(taken.rollout_id)] == list("cab")


async def test_a_sequence_id_that_leaves_no_room_for_the_next_is_refused(store: Store):
    taken = await begin(store)
    with pytest.raises(ValueError, match="sequence_id is 9223372036854775806, above"):
        await store.add_span(make_span(taken, 2**63 - 2))
    await store.add_span(make_span(taken, 2**53))
    pair = (taken.rollout_id, taken.attempt.attempt_id)
    assert await store.get_next_span_sequence_id(*pair) == 2**53 + 1


async def test_a_large_batch_is_kept_whole_and_in_order(store: Store):
    taken = await begin(store)
    spans = [make_span(taken, number) for number in range(1, 1501)]
    assert await store.add_many_spans(spans) == spans
    assert list(await store.query_spans(taken.rollout_id)) == spans
    assert (await store.statistics()).get("total_spans") == 1500
