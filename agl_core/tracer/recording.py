"""A span that is being recorded, as emitters and users see it (`Tracer.operation_context`)."""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode

from agl_core.tracer.attributes import describe_exception, format_exception_attributes
from agl_core.types.tracer import SpanCoreFields, TraceStatus
from agl_core.types.tracer import StatusCode as StatusName

EXCEPTION_EVENT = "exception"


class SpanRecording:
    """Writes to an OpenTelemetry span and remembers what it wrote.

    Args:
        span: Started already; what is written to one that does not record is only remembered.
        core: What it was started with.
    """

    def __init__(self, span: Span, core: SpanCoreFields) -> None:
        self.span = span
        self._core = core

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes."""
        self.span.set_attributes(dict(attributes))
        self._core.attributes.update(attributes)

    def record_exception(self, exception: BaseException) -> None:
        """Record an exception as an event and mark the span as failed."""
        self.span.add_event(EXCEPTION_EVENT, format_exception_attributes(exception))
        self.record_status("ERROR", describe_exception(exception))

    def record_status(self, status_code: StatusName, description: str | None = None) -> None:
        """Say how it ended."""
        set_status(self.span, status_code, description)
        self._core.status = TraceStatus(status_code=status_code, description=description)

    def get_recorded_span(self) -> SpanCoreFields:
        """Return what has been recorded so far."""
        return self._core.model_copy(deep=True)

    def finalize(self, end_time: float | None = None) -> None:
        """End the span, now or at a time in UTC epoch seconds; a second end changes nothing."""
        if self._core.end_time is not None:
            return
        self._core.end_time = time.time() if end_time is None else end_time
        self.span.end(to_nanoseconds(self._core.end_time))


def set_status(span: Span, status_code: StatusName, description: str | None = None) -> None:
    """Give a span its status; OpenTelemetry keeps a description of errors only."""
    kept = description if status_code == "ERROR" else None
    span.set_status(Status(StatusCode[status_code], kept))


def to_nanoseconds(seconds: float) -> int:
    """Return OpenTelemetry's form of a time."""
    return round(seconds * 1e9)
