import asyncio
import contextvars
import logging
import os
import socket
import sys
import threading

import pytest
from opentelemetry import trace as otel

from agl_core import semconv
from agl_core.errors import TraceError
from agl_core.tracer import OtelTracer, get_active_tracer, get_current_attempt


def test_spans_come_in_order_of_ends_with_sequence_ids_of_starts():
    tracer = OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        outer = tracer.start_span("outer")
        with otel.use_span(outer, end_on_exit=True):
            tracer.create_span("inner", {"n": 1})
    spans = trace.spans()
    assert [s.name for s in spans] == ["inner", "outer", semconv.ROLLOUT_SPAN]
    assert [s.attributes[semconv.SEQUENCE_ID] for s in spans] == [3, 2, 1]
    assert {s.attributes[semconv.ROLLOUT_ID] for s in spans} == {"ro-1"}
    assert {s.attributes[semconv.ATTEMPT_ID] for s in spans} == {"at-1"}
    inner, outer, root = spans
    assert inner.parent.span_id == outer.context.span_id
    assert outer.parent.span_id == root.context.span_id
    assert root.parent is None


def test_the_root_span_says_where_the_attempt_ran():
    tracer = OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        tracer.create_span("inner")
    inner, root = trace.spans()
    assert root.attributes[semconv.HOST_NAME] == socket.gethostname()
    assert root.attributes[semconv.PROCESS_ID] == os.getpid()
    assert root.attributes[semconv.EXECUTABLE] == sys.executable
    assert semconv.PROCESS_ID not in inner.attributes


def test_no_attempt_and_no_global_provider_outside():
    before = otel.get_tracer_provider()
    tracer = OtelTracer()
    assert get_active_tracer() is None
    with tracer.attempt("ro-1", "at-1"):
        assert get_active_tracer() is tracer
        assert get_current_attempt().rollout_id == "ro-1"
    assert get_active_tracer() is None
    assert otel.get_tracer_provider() is before


async def test_concurrent_attempts_in_tasks_and_threads_keep_their_spans():
    tracer = OtelTracer()
    traces = {}

    async def attempt(number: int) -> None:
        with tracer.attempt(f"ro-{number}", "at-1") as trace:
            traces[number] = trace
            for step in range(5):
                await asyncio.sleep(0)
                tracer.create_span("step", {"owner": number, "step": step})
                await asyncio.to_thread(tracer.create_span, "thread", {"owner": number})

    async with asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(attempt(number))
    for number, trace in traces.items():
        spans = trace.spans()[:-1]
        assert len(spans) == 10
        assert {s.attributes["owner"] for s in spans} == {number}
        assert sorted(s.attributes[semconv.SEQUENCE_ID] for s in spans) == list(range(2, 12))


def test_late_span_is_counted_and_named(caplog):
    tracer = OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        late = tracer.start_span("straggler")
    late.end()
    assert tracer.late_spans == 1
    assert [s.name for s in trace.spans()] == [semconv.ROLLOUT_SPAN]
    assert "name=straggler rollout=ro-1 attempt=at-1" in caplog.text


def test_span_of_no_attempt_is_counted(caplog):
    tracer = OtelTracer()
    tracer.create_span("stray")
    assert tracer.unattributed_spans == 1
    assert "name=stray" in caplog.text


def test_spans_beyond_the_limit_are_counted_and_the_root_is_kept(caplog):
    tracer = OtelTracer(max_spans_per_attempt=2)
    with tracer.attempt("ro-1", "at-1") as trace:
        for number in range(5):
            tracer.create_span(f"s{number}")
    assert [s.name for s in trace.spans()] == ["s0", "s1", semconv.ROLLOUT_SPAN]
    assert trace.dropped_spans == 3
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "first=s2" in warnings[0]
    assert "3 spans were dropped" in warnings[1]


def test_call_span_from_another_thread_is_a_child_of_the_root():
    tracer = OtelTracer()

    def serve() -> None:
        for _ in range(2):
            tracer.start_call("ro-1", "at-1").span.end()

    with tracer.attempt("ro-1", "at-1") as trace:
        thread = threading.Thread(target=contextvars.Context().run, args=(serve,))
        thread.start()
        thread.join()
    first, second, root = trace.spans()
    assert first.name == semconv.LLM_CALL_SPAN
    assert first.parent.span_id == root.context.span_id
    assert [s.attributes[semconv.CALL_INDEX] for s in (first, second)] == [0, 1]


def test_call_of_an_unknown_attempt_is_refused():
    with pytest.raises(TraceError, match="ro-1, attempt at-1 is not running"):
        OtelTracer().start_call("ro-1", "at-1")


def test_same_attempt_twice_at_once_is_refused():
    tracer = OtelTracer()
    with (
        tracer.attempt("ro-1", "at-1"),
        pytest.raises(ValueError, match="open already"),
        tracer.attempt("ro-1", "at-1"),
    ):
        pass


def test_environment_limits_neither_attributes_nor_recording(monkeypatch):
    monkeypatch.setenv("OTEL_ATTRIBUTE_COUNT_LIMIT", "3")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracer = OtelTracer()
    ids = list(range(50_000))
    with tracer.attempt("ro-1", "at-1") as trace:
        tracer.create_span("s", {f"k{n}": "long text" for n in range(300)} | {"ids": ids})
    span = trace.spans()[0]
    assert span.attributes["ids"] == tuple(ids)
    assert span.attributes["k0"] == "long text"
    assert len(span.attributes) == 304


def test_span_under_a_foreign_current_span_is_parented_to_the_root():
    tracer, foreign = OtelTracer(), OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        stranger = foreign.provider.get_tracer("x").start_span(
            "stranger", otel.set_span_in_context(otel.INVALID_SPAN)
        )
        with otel.use_span(stranger):
            tracer.create_span("ours")
        stranger.end()
    ours, root = trace.spans()
    assert ours.parent.span_id == root.context.span_id
    assert foreign.unattributed_spans == 1


def test_exception_in_the_attempt_goes_on_and_marks_the_root():
    tracer = OtelTracer()

    def body() -> None:
        with tracer.attempt("ro-1", "at-1") as trace:
            traces.append(trace)
            raise KeyError("x")

    traces = []
    with pytest.raises(KeyError):
        body()
    assert not traces[0].spans()[0].status.is_ok
    assert get_active_tracer() is None


def test_an_attempt_in_another_attempt_is_the_root_of_its_own_trace():
    tracer = OtelTracer()
    with (
        tracer.attempt("ro-1", "at-1") as outer,
        tracer.operation_context("around"),
        tracer.attempt("ro-2", "at-1") as inner,
    ):
        tracer.create_span("inside")
    inside, root = inner.recorded()
    assert root.parent_id is None
    assert inside.trace_id == root.trace_id != outer.recorded()[-1].trace_id
