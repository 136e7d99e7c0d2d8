import asyncio
import contextvars
import logging
import threading
import time

import pytest
from opentelemetry import trace as otel

from agl_core import semconv
from agl_core.emitter import emit_annotation, emit_reward
from agl_core.errors import StoreError, TransientError
from agl_core.store.memory import InMemoryLightningStore
from agl_core.tracer import (
    DummyTracer,
    OtelTracer,
    clear_active_tracer,
    get_active_tracer,
    set_active_tracer,
)
from agl_core.tracer.export import SpanExporter
from agl_core.types.tracer import TraceStatus
from tests.fakes import FlakySpanStore

NOW = 1_700_000_000.0


async def begin(store):
    rollout = await store.start_rollout("task")
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


async def test_an_attempts_spans_are_in_the_store_when_it_has_ended():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    ids = await begin(store)
    async with tracer.trace_context("agent", store=store, **ids):
        with tracer.operation_context("outer"):
            emit_annotation({"a": 1})
        emit_reward(1.0)
    spans = list(await store.query_spans(ids["rollout_id"]))
    assert [span.name for span in spans] == ["agent", "outer", *[semconv.ANNOTATION_SPAN] * 2]
    root, outer, note, reward = spans
    assert [span.sequence_id for span in spans] == [1, 2, 3, 4]
    assert (root.parent_id, outer.parent_id, note.parent_id) == (None, root.span_id, outer.span_id)
    assert note.attributes == {"a": 1}
    assert reward.attributes[semconv.PRIMARY_REWARD_VALUE] == 1.0
    assert sorted(tracer.get_last_trace(), key=lambda span: span.sequence_id) == spans
    assert (await store.get_rollout_by_id(ids["rollout_id"])).status == "running"


async def test_spans_are_stored_while_the_attempt_runs():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    ids = await begin(store)
    async with tracer.trace_context(store=store, **ids):
        emit_annotation({"a": 1})
        for _ in range(1000):
            if len(await store.query_spans(ids["rollout_id"])):
                break
            await asyncio.sleep(0.01)
        assert (await store.get_latest_attempt(ids["rollout_id"])).status == "running"
        emit_annotation({"a": 2})
    spans = await store.query_spans(ids["rollout_id"])
    assert [span.attributes.get("a") for span in spans] == [1, None, 2]


async def test_the_next_attempt_and_other_writers_get_further_sequence_ids():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    ids = await begin(store)
    async with tracer.trace_context(store=store, **ids):
        emit_annotation({"a": 1})
        others = await store.get_next_span_sequence_id(**ids)
    async with tracer.trace_context(store=store, **ids):
        pass
    spans = await store.query_spans(ids["rollout_id"])
    assert others == 1
    assert [span.sequence_id for span in spans] == [2, 3, 4]


async def test_many_attempts_at_once_in_tasks_and_threads_never_mix():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    tracer.init_worker(0, store)

    def in_thread(number):
        with tracer.operation_context("operation", {"owner": number}):
            time.sleep(0.001)
            emit_annotation({"owner": number})

    async def attempt(number):
        ids = await begin(store)
        async with tracer.trace_context(**ids):
            for _ in range(5):
                await asyncio.to_thread(in_thread, number)
                emit_annotation({"owner": number})
                with otel.get_tracer("foreign").start_as_current_span("foreign") as span:
                    await asyncio.sleep(0)
                    span.set_attribute("owner", number)
        traced = tracer.get_last_trace()
        return ids["rollout_id"], number, traced

    try:
        results = await asyncio.gather(*[attempt(number) for number in range(16)])
    finally:
        tracer.teardown_worker(0)
    for rollout_id, number, traced in results:
        spans = list(await store.query_spans(rollout_id))
        assert len(spans) == len(traced) == 21
        assert {span.span_id for span in spans} == {span.span_id for span in traced}
        assert {s.attributes["owner"] for s in spans if s.parent_id} == {number}
        assert {span.trace_id for span in spans} == {spans[0].trace_id}
        assert sorted(span.sequence_id for span in spans) == list(range(1, 22))


async def test_attempts_in_event_loops_of_several_threads_never_mix():
    store, tracer = InMemoryLightningStore(thread_safe=True), OtelTracer()
    found = {}

    async def attempt(number):
        ids = await begin(store)
        async with tracer.trace_context(store=store, **ids):
            for _ in range(10):
                emit_annotation({"owner": number})
                await asyncio.sleep(0.001)
        found[number] = [span.attributes.get("owner") for span in tracer.get_last_trace()]

    threads = [threading.Thread(target=asyncio.run, args=(attempt(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert found == {number: [*[number] * 10, None] for number in range(8)}


async def test_late_span_is_not_given_to_the_next_attempt():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    first, second = await begin(store), await begin(store)
    async with tracer.trace_context(store=store, **first):
        late = tracer.start_span("late")
    between = tracer.start_span("between")
    async with tracer.trace_context(store=store, **second):
        late.end()
        between.end()
    assert (tracer.late_spans, tracer.unattributed_spans) == (1, 1)
    for ids in (first, second):
        spans = await store.query_spans(ids["rollout_id"])
        assert [span.name for span in spans] == [semconv.ROLLOUT_SPAN]


async def test_no_span_waits_for_the_store():
    store, tracer = FlakySpanStore(delay_seconds=0.3), OtelTracer()
    async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
        started = time.perf_counter()
        for number in range(1000):
            emit_annotation({"n": number})
        elapsed = time.perf_counter() - started
    assert len(store.spans) == 1001
    assert store.num_calls <= 4
    assert elapsed < 30  # with one call for each span it would be 300 s


async def test_a_store_that_fails_for_a_while_gets_everything_once(caplog):
    store, tracer = FlakySpanStore(failures=3), OtelTracer()
    async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
        emit_annotation({"n": 1})
        await asyncio.sleep(0.3)
        emit_annotation({"n": 2})
    assert [span.attributes.get("n") for span in store.spans] == [1, 2, None]
    assert len({span.sequence_id for span in store.spans}) == 3
    assert "not stored yet, will try again: rollout=ro-1 attempt=at-1" in caplog.text


def exporter(store, **settings):
    return SpanExporter(store, window_seconds=0.01, **settings)


async def test_a_store_that_stays_away_is_an_error_that_counts_the_loss():
    store, tracer = FlakySpanStore(failures=10**6), OtelTracer()
    away = exporter(store, deadline_seconds=0.2)
    with tracer.attempt("ro-1", "at-1") as trace:
        away.start(trace)
        emit_annotation({"n": 1})
    with pytest.raises(TransientError, match=r"2 of 2 spans of rollout ro-1.*0.2 s: store is away"):
        await away.finish()


async def test_a_store_that_hangs_is_an_error_after_the_deadline():
    store, tracer = FlakySpanStore(delay_seconds=3600), OtelTracer()
    hanging = exporter(store, deadline_seconds=0.1)
    with tracer.attempt("ro-1", "at-1") as trace:
        hanging.start(trace)
    with pytest.raises(TransientError, match=r"1 of 1 spans.*TimeoutError"):
        await hanging.finish()


async def test_spans_go_in_batches():
    store, tracer = FlakySpanStore(), OtelTracer()
    batches = exporter(store, batch_spans=10)
    with tracer.attempt("ro-1", "at-1") as trace:
        batches.start(trace)
        for number in range(25):
            emit_annotation({"n": number})
    await batches.finish()
    assert store.batch_sizes == [10, 10, 6]


async def test_a_store_that_refuses_is_an_error_at_once():
    tracer = OtelTracer()
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"1 of 1 spans of rollout ro-none.*refused"):
        async with tracer.trace_context(
            store=InMemoryLightningStore(), rollout_id="ro-none", attempt_id="at-none"
        ):
            pass
    assert time.monotonic() - started < 10


async def test_the_agents_error_comes_before_that_of_the_store(caplog):
    tracer = OtelTracer()
    ids = {"rollout_id": "ro-none", "attempt_id": "at-none"}
    with pytest.raises(KeyError, match="agent"):
        async with tracer.trace_context(store=InMemoryLightningStore(), **ids):
            raise KeyError("agent")
    assert "spans were lost: rollout=ro-none attempt=at-none" in caplog.text


async def test_a_cancelled_attempt_keeps_its_spans():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    ids = await begin(store)

    async def agent():
        async with tracer.trace_context(store=store, **ids):
            emit_annotation({"n": 1})
            await asyncio.sleep(3600)

    task = asyncio.create_task(agent())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await store.query_spans(ids["rollout_id"])) == 2


async def test_who_is_cancelled_while_spans_are_sent_still_waits_for_them():
    store, tracer = FlakySpanStore(delay_seconds=0.3), OtelTracer()

    async def agent():
        async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
            emit_annotation({"n": 1})

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(agent(), 0.1)
    assert store.batch_sizes == [2]


@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_spans_lost_to_a_cancel_are_in_the_log(num_cancels, caplog):
    store, tracer = FlakySpanStore(delay_seconds=3600), OtelTracer()
    hanging = exporter(store, deadline_seconds=0.1 if num_cancels == 1 else 3600)
    with tracer.attempt("ro-1", "at-1") as trace:
        hanging.start(trace)
    task = asyncio.create_task(hanging.finish())
    for _ in range(num_cancels):
        await asyncio.sleep(0.05)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.05)
    assert "spans were lost" in caplog.text
    assert "1 of 1 spans of rollout ro-1, attempt at-1" in caplog.text


async def test_an_attempt_that_ends_the_process_leaves_no_exporter_behind():
    store, tracer = FlakySpanStore(), OtelTracer()
    before = asyncio.all_tasks()
    with pytest.raises(SystemExit):
        async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
            raise SystemExit(3)
    assert store.batch_sizes == [1]
    assert asyncio.all_tasks() == before


async def test_an_attempt_may_be_left_in_another_task_than_it_was_entered_in():
    store, tracer = FlakySpanStore(), OtelTracer()
    ids = {"rollout_id": "ro-1", "attempt_id": "at-1"}
    context = tracer.trace_context(store=store, **ids)
    await asyncio.create_task(context.__aenter__())
    await asyncio.create_task(context.__aexit__(None, None, None))
    assert store.batch_sizes == [1]
    async with tracer.trace_context(store=store, **ids):
        pass
    with DummyTracer().attempt("ro-1", "at-1") as trace:
        pass
    assert trace.is_closed


async def test_text_that_is_no_unicode_and_huge_numbers_are_stored_in_another_form():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    ids = await begin(store)
    async with tracer.trace_context(store=store, **ids):
        tracer.create_span("bad \udcff", {"t": "\udcff", "l": ["\udcff", "b"], "n": 2**70})
        tracer.create_span(
            "s", {"\udcff": 1, "big": [1, 10**5000]}, NOW, TraceStatus(status_code="ERROR")
        )
        with pytest.raises(ValueError, match="x"), tracer.operation_context("op"):
            raise ValueError("x\udcff")
    first, second, failed = list(await store.query_spans(ids["rollout_id"]))[1:]
    assert first.name == "bad \\udcff"
    assert first.attributes == {"t": "\\udcff", "l": ["\\udcff", "b"], "n": hex(2**70)}
    assert second.attributes == {"\\udcff": 1, "big": [1, hex(10**5000)]}
    assert failed.status.description == "ValueError: x\\udcff"


class PickyStore(FlakySpanStore):
    """Refuses batches with a span that has one of these names."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.num_batches = 0

    async def add_many_spans(self, spans):
        self.num_batches += 1
        if any(span.name in self.names for span in spans):
            raise ValueError("odd")
        return await super().add_many_spans(spans)


async def test_of_a_batch_that_is_refused_only_the_refused_spans_are_lost_by_name():
    store, tracer = PickyStore("odd-1", "odd-2"), OtelTracer()
    with pytest.raises(StoreError, match=r"2 of 101 spans.*refused: 'odd-1': odd; 'odd-2': odd"):
        async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
            for number in range(98):
                tracer.create_span(f"s{number}")
            tracer.create_span("odd-1")
            tracer.create_span("odd-2")
    assert len(store.spans) == 99
    assert store.num_batches < 30


async def test_a_store_that_refuses_all_spans_is_not_asked_for_each():
    store, tracer = PickyStore("s"), OtelTracer()
    with pytest.raises(StoreError, match=r"501 of 501 spans.*refused: odd"):
        async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
            for _ in range(500):
                tracer.create_span("s")
    assert store.num_batches < 100


async def test_what_a_stores_client_records_is_no_part_of_the_attempt():
    class Traced(FlakySpanStore):
        async def add_many_spans(self, spans):
            with otel.get_tracer("http").start_as_current_span("POST /spans"):
                return await super().add_many_spans(spans)

    store, tracer = Traced(), OtelTracer(instrument_openai=False)
    with tracer.lifespan(store):
        async with tracer.trace_context(rollout_id="ro-1", attempt_id="at-1"):
            emit_annotation({"n": 1})
            await asyncio.sleep(0.5)
    assert [span.name for span in store.spans] == [semconv.ANNOTATION_SPAN, semconv.ROLLOUT_SPAN]


async def test_a_batch_that_is_sent_again_keeps_its_sequence_ids():
    class AwayOnce(FlakySpanStore):
        async def add_many_spans(self, spans):
            self.failures = 1 - self.num_failed
            self.num_failed = 1
            return await super().add_many_spans(spans)

    store, tracer = AwayOnce(), OtelTracer()
    store.num_failed = 0
    async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
        emit_annotation({"n": 1})
    assert store.num_calls == 3  # ids, the spans twice
    kept = {span.span_id: span.sequence_id for span in store.spans}
    assert kept == {span.span_id: span.sequence_id for span in tracer.get_last_trace()}
    assert sorted(kept.values()) == [1, 2]


async def test_a_send_that_hangs_while_the_attempt_runs_is_given_up_and_tried_again():
    store, tracer = FlakySpanStore(delay_seconds=3600), OtelTracer()
    hanging = exporter(store, deadline_seconds=0.2)
    with tracer.attempt("ro-1", "at-1") as trace:
        hanging.start(trace)
        emit_annotation({"n": 1})
        await asyncio.sleep(0.1)
        store.delay_seconds = 0.0
        for _ in range(1000):
            if store.spans:
                break
            await asyncio.sleep(0.01)
        assert len(store.spans) == 1
    await hanging.finish()


@pytest.mark.parametrize("ids", [{"rollout_id": "ro-1"}, {"attempt_id": "at-1"}])
async def test_one_id_alone_is_refused(ids):
    with pytest.raises(ValueError, match="together or not at all"):
        async with OtelTracer().trace_context(**ids):
            pass


async def test_without_ids_the_spans_stay_in_memory():
    store, tracer = FlakySpanStore(), OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("try"):
            emit_annotation({"a": 1})
        assert [span.name for span in tracer.get_last_trace()] == [semconv.ANNOTATION_SPAN, "try"]
    assert store.spans == []
    assert OtelTracer().get_last_trace() == []


async def test_functions_can_be_traced_alone():
    tracer = OtelTracer()

    async def answer(value):
        emit_annotation({"value": value})
        return value

    assert tracer.trace_run(emit_annotation, {"a": 1}).attributes == {"a": 1}
    assert [span.name for span in tracer.get_last_trace()][-1] == "emit_annotation"
    assert await tracer.trace_run_async(answer, value=3) == 3
    note, root = tracer.get_last_trace()
    assert note.attributes == {"value": 3}
    assert root.name.endswith("answer")


async def test_after_a_trace_in_a_trace_the_last_one_is_again_the_outer_one():
    tracer = OtelTracer()

    async def last_elsewhere():
        return await asyncio.to_thread(lambda: contextvars.Context().run(tracer.get_last_trace))

    async with tracer.trace_context("outer"):
        emit_annotation({"n": 1})
        async with tracer.trace_context("inner"):
            assert tracer.get_last_trace() == []
        tracer.trace_run(emit_annotation, {"n": 2})
        assert [span.attributes for span in tracer.get_last_trace()] == [{"n": 1}]
        assert await last_elsewhere() == tracer.get_last_trace()
        with DummyTracer().attempt("ro-1", "at-1"):
            pass
    assert [span.name for span in tracer.get_last_trace()] == [semconv.ANNOTATION_SPAN, "outer"]
    assert DummyTracer().get_last_trace() == []


async def test_the_last_trace_is_that_of_the_own_task():
    tracer = OtelTracer()

    async def attempt(number):
        async with tracer.trace_context(f"attempt-{number}"):
            await asyncio.sleep(0.01 * (4 - number))
        await asyncio.sleep(0.05)
        return [span.name for span in tracer.get_last_trace()]

    names = await asyncio.gather(*[attempt(number) for number in range(4)])
    assert names == [[f"attempt-{number}"] for number in range(4)]
    assert len(tracer.get_last_trace()) == 1


def test_an_operation_is_returned_as_it_is_recorded():
    tracer = OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        with tracer.operation_context("op", {"a": 1}, start_time=NOW, end_time=NOW + 2.5) as op:
            op.record_attributes({"b": 2})
            op.record_status("OK")
        core = op.get_recorded_span()
    recorded = trace.recorded()[0]
    assert (core.name, core.attributes, core.status.status_code) == ("op", {"a": 1, "b": 2}, "OK")
    assert (core.start_time, core.end_time) == (NOW, NOW + 2.5)
    assert (recorded.start_time, recorded.end_time) == (NOW, NOW + 2.5)
    assert (recorded.attributes, recorded.status.status_code) == (core.attributes, "OK")


def test_an_exception_ends_an_operation_as_failed():
    tracer = OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        with pytest.raises(KeyError), tracer.operation_context("op") as op:
            raise KeyError("x")
        op.finalize(1.0)
    recorded = trace.recorded()[0]
    assert op.get_recorded_span().status == recorded.status
    assert recorded.status.description == "KeyError: 'x'"
    assert [event.name for event in recorded.events] == ["exception"]
    assert recorded.end_time > 1.0


def test_a_span_without_duration_has_the_time_and_status_given():
    tracer = OtelTracer()
    status = TraceStatus(status_code="ERROR", description="why")
    with tracer.attempt("ro-1", "at-1") as trace:
        core = tracer.create_span("s", {"a": 1}, NOW, status)
    recorded = trace.recorded()[0]
    assert (core.start_time, core.end_time, core.status) == (NOW, NOW, status)
    assert (recorded.start_time, recorded.end_time, recorded.status) == (NOW, NOW, status)


async def test_the_dummy_tracer_runs_attempts_and_keeps_nothing():
    store, tracer = FlakySpanStore(), DummyTracer()
    async with tracer.trace_context(store=store, rollout_id="ro-1", attempt_id="at-1") as trace:
        assert get_active_tracer() is tracer
        assert emit_reward(1.0).attributes[semconv.PRIMARY_REWARD_VALUE] == 1.0
        call = tracer.start_call("ro-1", "at-1")
        call.span.end()
        with tracer.operation_context("op", {"a": 1}) as op:
            pass
        assert op.get_recorded_span().attributes == {"a": 1}
    assert trace.spans() == tracer.get_last_trace() == store.spans == []


@pytest.fixture
def _no_active_tracer():
    clear_active_tracer()
    yield
    clear_active_tracer()


@pytest.mark.usefixtures("_no_active_tracer")
def test_a_tracer_can_be_made_active_outside_of_attempts():
    tracer = DummyTracer()
    set_active_tracer(tracer)
    assert get_active_tracer() is tracer
    with pytest.raises(ValueError, match="active here already"):
        set_active_tracer(DummyTracer())
    with OtelTracer().attempt("ro-1", "at-1"):
        assert get_active_tracer() is not tracer
    seen = []
    thread = threading.Thread(target=lambda: seen.append(get_active_tracer()))
    thread.start()
    thread.join()
    assert seen == [None]
    clear_active_tracer()
    assert get_active_tracer() is None


def test_spans_of_the_global_api_go_to_the_attempt_or_nowhere(caplog):
    tracer = OtelTracer(instrument_openai=False)
    foreign = otel.get_tracer("before")
    with tracer.lifespan():
        foreign.start_span("outside").end()
        with (
            tracer.attempt("ro-1", "at-1") as trace,
            foreign.start_as_current_span("outer"),
        ):
            otel.get_tracer("inside").start_span("inner").end()
    with tracer.attempt("ro-2", "at-1"), DummyTracer().attempt("ro-3", "at-1"):
        foreign.start_span("dummy").end()
    inner, outer, root = trace.spans()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert inner.parent.span_id == outer.context.span_id
    assert outer.parent.span_id == root.context.span_id
    assert tracer.unattributed_spans == 0
    with caplog.at_level(logging.WARNING):
        foreign.start_span("afterwards").end()
    assert "afterwards" not in caplog.text


def test_a_global_provider_of_somebody_else_is_left_alone_and_named(monkeypatch, caplog):
    theirs = OtelTracer().provider
    monkeypatch.setattr(otel, "get_tracer_provider", lambda: theirs)
    with OtelTracer(instrument_openai=False).lifespan():
        assert otel.get_tracer_provider() is theirs
    assert "has a global provider already" in caplog.text


def test_there_is_no_langchain_handler():
    with pytest.raises(NotImplementedError, match="recorded without one"):
        OtelTracer().get_langchain_handler()
