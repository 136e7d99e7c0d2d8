"""Spans of an agent in a process of its own, on their way to the attempt's trace, as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from agl_core import semconv
from agl_core.tracer.attempt_trace import AttemptTrace

JsonDict = dict[str, Any]


def span_to_message(span: ReadableSpan) -> JsonDict:
    """Return a finished span as JSON; ids are integers, times nanoseconds."""
    context = span.get_span_context()
    assert context is not None, "a finished span has a context"
    return {
        "name": span.name,
        "trace_id": context.trace_id,
        "span_id": context.span_id,
        "parent_id": span.parent.span_id if span.parent else None,
        "kind": span.kind.name,
        "start_time": span.start_time,
        "end_time": span.end_time,
        "status": span.status.status_code.name,
        "description": span.status.description,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": e.name, "time": e.timestamp, "attributes": dict(e.attributes or {})}
            for e in span.events
        ],
        "links": [
            {
                "trace_id": link.context.trace_id,
                "span_id": link.context.span_id,
                "attributes": dict(link.attributes or {}),
            }
            for link in span.links
        ],
    }


def message_to_span(message: JsonDict, trace: AttemptTrace, root_id: int) -> ReadableSpan:
    """Return the span as one of an attempt of this process, with the attempt's next number.

    Args:
        message: Of `span_to_message`.
        trace: The attempt; what was below the agent's root span is below the attempt's.
        root_id: Id of the agent's own root span.
    """
    root = trace.root.get_span_context()
    parent_id = message["parent_id"]
    own_trace = message["trace_id"]
    attributes = _attributes(message["attributes"])
    return ReadableSpan(
        name=message["name"],
        context=_context(root.trace_id, message["span_id"]),
        parent=_context(root.trace_id, root.span_id if parent_id in (None, root_id) else parent_id),
        resource=getattr(trace.root, "resource", None),
        attributes=attributes | {semconv.SEQUENCE_ID: trace.next_sequence_id()},
        events=[
            Event(e["name"], _attributes(e["attributes"]), e["time"]) for e in message["events"]
        ],
        links=[
            Link(
                _context(
                    root.trace_id if link["trace_id"] == own_trace else link["trace_id"],
                    link["span_id"],
                ),
                _attributes(link["attributes"]),
            )
            for link in message["links"]
        ],
        kind=SpanKind[message["kind"]],
        status=Status(StatusCode[message["status"]], message["description"]),
        start_time=message["start_time"],
        end_time=message["end_time"],
    )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as OpenTelemetry keeps them: sequences are tuples."""
    return {
        name: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for name, value in values.items()
    }
