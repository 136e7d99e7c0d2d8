"""OTLP (protobuf, traces) from and to spans of attempts: pure.

An OTLP span says where it belongs in its attributes, or else in its resource's:
`agentlightning.rollout_id`, `agentlightning.attempt_id`, `agentlightning.span_sequence_id`.
Bytes become hex; of a parent only the id is known.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from agl_core import semconv
from agl_core.types.tracer import (
    Attributes,
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    StatusCode,
    TraceStatus,
)

_MAX_STATE_ENTRIES = 32
UNNUMBERED = -1
"""Sequence id of a span that brought none, or none that can be used."""

_STATUS_CODES: Sequence[StatusCode] = get_args(StatusCode)
"""In OTLP's order: 0 unset, 1 ok, 2 error."""


@dataclass(frozen=True, slots=True)
class ReceivedSpans:
    """What a request held."""

    spans: list[Span]
    """In their order; `sequence_id` may be `UNNUMBERED`."""
    num_without_attempt: int
    """Spans left out: they do not say to which rollout and attempt they belong."""
    num_without_ids: int = 0
    """Spans left out: their trace, span or parent id is none by OTLP (16, 8 and 8 bytes, not all
    zero)."""


def spans_from_otlp(request: ExportTraceServiceRequest) -> ReceivedSpans:
    """Return the spans of a request."""
    spans: list[Span] = []
    num_without_attempt = num_without_ids = 0
    for group in request.resource_spans:
        resource = OtelResource(
            attributes=_attributes(group.resource.attributes), schema_url=group.schema_url
        )
        for otlp in (span for scope in group.scope_spans for span in scope.spans):
            span = _span(otlp, resource)
            if span is None:
                num_without_attempt += 1
            elif not _has_ids(otlp):
                num_without_ids += 1
            else:
                spans.append(span)
    return ReceivedSpans(spans, num_without_attempt, num_without_ids)


def spans_to_otlp(spans: Iterable[Span]) -> ExportTraceServiceRequest:
    """Return a request with these spans, which say in their attributes where they belong."""
    request = ExportTraceServiceRequest()
    for span in spans:
        group = request.resource_spans.add(
            resource=Resource(attributes=_key_values(span.resource.attributes)),
            schema_url=span.resource.schema_url,
        )
        group.scope_spans.add().spans.append(_otlp_span(span))
    return request


def _span(otlp: OtlpSpan, resource: OtelResource) -> Span | None:
    attributes = _attributes(otlp.attributes)

    def find(name: str) -> Any:
        return attributes.get(name, resource.attributes.get(name))

    rollout_id, attempt_id = find(semconv.ROLLOUT_ID), find(semconv.ATTEMPT_ID)
    if not rollout_id or not attempt_id:
        return None
    context = _context(otlp, is_remote=False)
    return Span(
        rollout_id=str(rollout_id),
        attempt_id=str(attempt_id),
        sequence_id=_sequence_id(find(semconv.SEQUENCE_ID)),
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=otlp.parent_span_id.hex() if any(otlp.parent_span_id) else None,
        name=otlp.name,
        status=TraceStatus(
            status_code=_STATUS_CODES[otlp.status.code]
            if otlp.status.code in (0, 1, 2)
            else "UNSET",
            description=otlp.status.message or None,
        ),
        attributes=attributes,
        events=[
            Event(
                name=event.name,
                attributes=_attributes(event.attributes),
                timestamp=_seconds(event.time_unix_nano),
            )
            for event in otlp.events
        ],
        links=[
            Link(context=_context(link, is_remote=False), attributes=_attributes(link.attributes))
            for link in otlp.links
        ],
        start_time=_seconds(otlp.start_time_unix_nano),
        end_time=_seconds(otlp.end_time_unix_nano),
        context=context,
        resource=resource,
    )


def _otlp_span(span: Span) -> OtlpSpan:
    ids = {
        semconv.ROLLOUT_ID: span.rollout_id,
        semconv.ATTEMPT_ID: span.attempt_id,
        semconv.SEQUENCE_ID: span.sequence_id,
    }
    otlp = OtlpSpan(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id or ""),
        trace_state=_state_text(span.context.trace_state if span.context else {}),
        name=span.name,
        start_time_unix_nano=_nanoseconds(span.start_time),
        end_time_unix_nano=_nanoseconds(span.end_time),
        attributes=_key_values(span.attributes | ids),
        status=Status(
            code=Status.StatusCode.ValueType(_STATUS_CODES.index(span.status.status_code)),
            message=span.status.description or "",
        ),
    )
    for event in span.events:
        otlp.events.add(
            name=event.name,
            time_unix_nano=_nanoseconds(event.timestamp),
            attributes=_key_values(event.attributes),
        )
    for link in span.links:
        otlp.links.add(
            trace_id=bytes.fromhex(link.context.trace_id),
            span_id=bytes.fromhex(link.context.span_id),
            trace_state=_state_text(link.context.trace_state),
            attributes=_key_values(link.attributes or {}),
        )
    return otlp


def _has_ids(otlp: OtlpSpan) -> bool:
    return (
        len(otlp.trace_id) == 16
        and len(otlp.span_id) == 8
        and len(otlp.parent_span_id) in (0, 8)
        and any(otlp.trace_id)
        and any(otlp.span_id)
    )


def _sequence_id(value: Any) -> int:
    try:
        return max(int(value), UNNUMBERED)
    except (TypeError, ValueError, OverflowError):
        return UNNUMBERED


def _context(otlp: OtlpSpan | OtlpSpan.Link, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        trace_id=otlp.trace_id.hex(),
        span_id=otlp.span_id.hex(),
        is_remote=is_remote,
        trace_state=dict(_state_entries(otlp.trace_state)),
    )


def _state_entries(text: str) -> Iterator[tuple[str, str]]:
    """Return the entries of a W3C trace state, `key=value,key=value`; one of more than 32, the
    most that W3C allows, has none.
    """
    if text.count(",") >= _MAX_STATE_ENTRIES:
        return
    for entry in text.split(","):
        key, separator, value = entry.strip().partition("=")
        if separator:
            yield key, value


def _state_text(state: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in state.items())


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _nanoseconds(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1e9)


def _attributes(pairs: Iterable[KeyValue]) -> Attributes:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "bytes_value":
        return value.bytes_value.hex()
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind)


def _key_values(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items()]


def _any_value(value: Any) -> AnyValue:
    found = AnyValue()
    if isinstance(value, bool):
        found.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        found.int_value = value
    elif isinstance(value, float):
        found.double_value = value
    elif isinstance(value, Mapping):
        found.kvlist_value.values.extend(_key_values(value))
    elif isinstance(value, list | tuple):
        found.array_value.values.extend(_any_value(item) for item in value)
    elif value is not None:
        found.string_value = str(value)
    return found
