"""Spans as the store keeps them: OpenTelemetry's model with the ids of rollout and attempt."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from opentelemetry import trace as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as OtelEvent
from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel, ConfigDict, Field

from agl_core import semconv

AttributeValue = str | bool | int | float | Sequence[str | bool | int | float | None]
Attributes = dict[str, Any]
"""Names to values of type `AttributeValue`; not validated one by one, a span may hold long lists of
token ids."""
TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]

_LATEST_SECONDS = 1e12
"""A larger time is in nanoseconds."""


def convert_timestamp(timestamp: float | None) -> float | None:
    """Return a time in seconds; one above 1e12 is taken for nanoseconds."""
    if timestamp is None or timestamp <= _LATEST_SECONDS:
        return timestamp
    return timestamp / 1e9


class _Record(BaseModel):
    # Spans come from other people's agents: what we do not know is kept, and so is NaN in JSON.
    model_config = ConfigDict(extra="allow", ser_json_inf_nan="constants")


class TraceStatus(_Record):
    """How the operation of a span ended."""

    status_code: StatusCode = "UNSET"
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, status: otel.Status) -> Self:
        """Return an OpenTelemetry status as a record."""
        return cls(
            status_code=status.status_code.name,
            description=None if status.description is None else plain_text(status.description),
        )


class SpanContext(_Record):
    """Identity of a span."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    is_remote: bool = False
    trace_state: TraceState = Field(default_factory=TraceState)

    @classmethod
    def from_opentelemetry(cls, context: otel.SpanContext) -> Self:
        """Return an OpenTelemetry span context as a record."""
        return cls(
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            is_remote=context.is_remote,
            trace_state=dict(context.trace_state),
        )


class Event(_Record):
    """Something that happened during a span."""

    name: str
    attributes: Attributes = Field(default_factory=Attributes)
    timestamp: float | None = None
    """UTC epoch seconds."""

    @classmethod
    def from_opentelemetry(cls, event: OtelEvent) -> Self:
        """Return an OpenTelemetry event as a record."""
        return cls(
            name=plain_text(event.name),
            attributes=_plain(event.attributes),
            timestamp=convert_timestamp(event.timestamp),
        )


class Link(_Record):
    """A span's reference to another one."""

    context: SpanContext
    attributes: Attributes | None = None

    @classmethod
    def from_opentelemetry(cls, link: otel.Link) -> Self:
        """Return an OpenTelemetry link as a record."""
        return cls(
            context=SpanContext.from_opentelemetry(link.context),
            attributes=_plain(link.attributes),
        )


class OtelResource(_Record):
    """What produced a span."""

    attributes: Attributes = Field(default_factory=Attributes)
    schema_url: str = ""

    @classmethod
    def from_opentelemetry(cls, resource: Resource) -> Self:
        """Return an OpenTelemetry resource as a record."""
        return cls(attributes=_plain(resource.attributes), schema_url=resource.schema_url)


class SpanLike(Protocol):
    """Anything that was recorded under a name with attributes."""

    @property
    def name(self) -> str:
        """Name of the operation."""
        ...

    @property
    def attributes(self) -> Mapping[str, Any] | None:
        """What was recorded about it."""
        ...


class SpanCoreFields(BaseModel):
    """A span before it belongs to an attempt."""

    model_config = ConfigDict(extra="forbid")

    name: str
    attributes: Attributes = Field(default_factory=Attributes)
    start_time: float | None = None
    """UTC epoch seconds."""
    end_time: float | None = None
    status: TraceStatus = Field(default_factory=TraceStatus)


class SpanRecordingContext(Protocol):
    """A span that is being recorded (`Tracer.operation_context`)."""

    def record_exception(self, exception: BaseException) -> None:
        """Record an exception and mark the span as failed."""
        ...

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes."""
        ...

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Say how it ended."""
        ...

    def get_recorded_span(self) -> SpanCoreFields:
        """Return what has been recorded so far."""
        ...

    def finalize(self, end_time: float | None = None) -> None:
        """End the span, now or at a time in UTC epoch seconds."""
        ...


class Span(_Record):
    """One span of one attempt at a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """Order of the spans of a rollout; spans may share one."""
    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    parent_id: str | None = None
    name: str
    status: TraceStatus = Field(default_factory=TraceStatus)
    attributes: Attributes = Field(default_factory=Attributes)
    events: list[Event] = Field(default_factory=list[Event])
    links: list[Link] = Field(default_factory=list[Link])
    start_time: float | None = None
    """UTC epoch seconds."""
    end_time: float | None = None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: OtelResource = Field(default_factory=OtelResource)

    @classmethod
    def from_opentelemetry(
        cls, span: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int
    ) -> Self:
        """Return a recorded OpenTelemetry span as a span of an attempt.

        Raises:
            ValueError: The span has no context, so no identity.
        """
        context = span.get_span_context()
        if context is None:
            raise ValueError(f"span {span.name!r} has no context")
        ids = SpanContext.from_opentelemetry(context)
        parent = SpanContext.from_opentelemetry(span.parent) if span.parent else None
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=ids.trace_id,
            span_id=ids.span_id,
            parent_id=parent.span_id if parent else None,
            name=plain_text(span.name),
            status=TraceStatus.from_opentelemetry(span.status),
            attributes=_plain(span.attributes),
            events=[Event.from_opentelemetry(event) for event in span.events],
            links=[Link.from_opentelemetry(link) for link in span.links],
            start_time=convert_timestamp(span.start_time),
            end_time=convert_timestamp(span.end_time),
            context=ids,
            parent=parent,
            resource=OtelResource.from_opentelemetry(span.resource),
        )

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Mapping[str, Any],
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        name: str | None = None,
        resource: OtelResource | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        status: TraceStatus | None = None,
    ) -> Self:
        """Return a span that nobody recorded; its status is OK if none is given."""
        return cls.from_core_fields(
            SpanCoreFields(
                name=name or semconv.VIRTUAL_SPAN,
                attributes=dict(attributes),
                start_time=start_time,
                end_time=end_time,
                status=status or TraceStatus(status_code="OK"),
            ),
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            resource=resource,
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        resource: OtelResource | None = None,
    ) -> Self:
        """Return recorded fields as a span of an attempt; it starts now if no time is given.

        Trace and span ids that are not given are random; without a rollout and an attempt the span
        belongs to none.
        """
        trace_id, span_id = trace_id or secrets.token_hex(16), span_id or secrets.token_hex(8)
        start_time = time.time() if core.start_time is None else core.start_time
        parent = SpanContext(trace_id=trace_id, span_id=parent_id) if parent_id else None
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=core.name,
            status=core.status,
            attributes=core.attributes,
            start_time=start_time,
            end_time=start_time if core.end_time is None else core.end_time,
            context=SpanContext(trace_id=trace_id, span_id=span_id),
            parent=parent,
            resource=resource or OtelResource(),
        )


RolloutRawResult = float | Sequence[ReadableSpan] | Sequence[Span] | Sequence[SpanCoreFields] | None
"""What an agent may return: nothing, its reward, or the spans of the attempt."""


def _plain(attributes: Mapping[str, Any] | None) -> Attributes:
    """Return attributes with lists for tuples, bytes as hex, and foreign values as JSON.

    Integers beyond 64 bits become text; text that is no Unicode is escaped (`plain_text`).
    """
    return {plain_text(name): _plain_value(value) for name, value in (attributes or {}).items()}


def plain_text(text: str) -> str:
    """Return text that UTF-8 can express: lone surrogates, as in odd file names, are escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int):
        # hex, because Python makes no decimal text of more than 4300 digits.
        return value if _fit_64_bits([value]) else hex(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        # Token ids and log-probs are many and plain: they get no look at each.
        if kinds <= {float} or (kinds == {int} and _fit_64_bits(value)):
            return list(value)
        return [_plain_value(item) for item in value]
    return json.dumps(value, default=str)


def _fit_64_bits(values: Sequence[int]) -> bool:
    return min(values) >= -(2**63) and max(values) < 2**63
