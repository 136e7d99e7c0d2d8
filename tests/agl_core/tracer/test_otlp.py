import math
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl_core import semconv
from agl_core.tracer.otlp import UNNUMBERED, spans_from_otlp, spans_to_otlp
from agl_core.types.tracer import Event, Link, OtelResource, Span, SpanContext, TraceStatus


def make_span(**fields: Any) -> Span:
    context = SpanContext(trace_id="a" * 32, span_id="b" * 16, trace_state={"k": "v", "l": "w"})
    values: dict[str, Any] = {
        "rollout_id": "ro-1",
        "attempt_id": "at-1",
        "sequence_id": 3,
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "parent_id": "c" * 16,
        "name": "step",
        "status": TraceStatus(status_code="ERROR", description="wrong"),
        "attributes": {
            "text": "x",
            "whole": -5,
            "share": 0.25,
            "yes": True,
            "ids": [1, 2],
            "none": None,
            "nested": {"a": ["b", 1.5]},
            "infinite": math.inf,
        },
        "events": [Event(name="e", attributes={"n": 1}, timestamp=1.5)],
        "links": [Link(context=context, attributes={"n": 2})],
        "start_time": 1.25,
        "end_time": 2.5,
        "context": context,
        "resource": OtelResource(attributes={"service.name": "s"}, schema_url="http://schema"),
        **fields,
    }
    return Span(**values)


def there_and_back(span: Span) -> Span:
    content = spans_to_otlp([span]).SerializeToString()
    (back,) = spans_from_otlp(ExportTraceServiceRequest.FromString(content)).spans
    for name in (semconv.ROLLOUT_ID, semconv.ATTEMPT_ID, semconv.SEQUENCE_ID):
        del back.attributes[name]
    return back


@pytest.mark.parametrize("status", ["UNSET", "OK", "ERROR"])
def test_a_span_comes_back_as_it_was(status: str):
    span = make_span(status=TraceStatus(status_code=status, description=None))  # pyright: ignore
    assert there_and_back(span) == span
    assert there_and_back(make_span()) == make_span()


@pytest.mark.parametrize(("num_entries", "kept"), [(32, 32), (33, 0)])
def test_a_trace_state_beyond_the_limit_of_w3c_is_left_out(num_entries: int, kept: int):
    state = {f"k{n}": "v" for n in range(num_entries)}
    span = make_span(context=SpanContext(trace_id="a" * 32, span_id="b" * 16, trace_state=state))
    context = there_and_back(span).context
    assert context is not None
    assert len(context.trace_state) == kept


def test_times_that_are_not_known_stay_so():
    span = make_span(start_time=None, end_time=None)
    assert there_and_back(span) == span


def request_with(**attributes: Any) -> ExportTraceServiceRequest:
    request = spans_to_otlp([make_span(attributes={})])
    (group,) = request.resource_spans
    span = group.scope_spans[0].spans[0]
    del span.attributes[:]
    for name, value in attributes.items():
        span.attributes.append(KeyValue(key=f"agentlightning.{name}", value=value))
    group.resource.attributes.extend(
        KeyValue(key=key, value=AnyValue(string_value=value))
        for key, value in ((semconv.ROLLOUT_ID, "ro-r"), (semconv.ATTEMPT_ID, "at-r"))
    )
    return request


def test_a_spans_own_ids_come_before_those_of_its_resource():
    own = request_with(rollout_id=AnyValue(string_value="ro-s"))
    (span,) = spans_from_otlp(own).spans
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == ("ro-s", "at-r", UNNUMBERED)


def test_bytes_become_hex():
    request = request_with(raw=AnyValue(bytes_value=b"\x01\xff"))
    (span,) = spans_from_otlp(request).spans
    assert span.attributes["agentlightning.raw"] == "01ff"


def test_spans_of_no_attempt_are_counted():
    request = spans_to_otlp([make_span(), make_span(rollout_id="")])
    found = spans_from_otlp(request)
    assert (len(found.spans), found.num_without_attempt) == (1, 1)
