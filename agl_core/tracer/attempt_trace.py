"""The spans of one attempt, kept in memory while it runs: numbered, bounded, closed once."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util._decorator import _agnosticcontextmanager

from agl_core import semconv
from agl_core.types.tracer import Span as SpanRecord

logger = logging.getLogger(__name__)


class AttemptTrace(otel.Tracer):
    """The spans of one attempt; safe to use from several threads.

    It is also OpenTelemetry's tracer of that attempt: spans that it starts, in any thread, belong
    to the attempt, below the current span of its trace, else below its root.
    """

    def __init__(self, rollout_id: str, attempt_id: str, max_spans: int) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.max_spans = max_spans
        self.root: Span = otel.INVALID_SPAN
        self.tracer: otel.Tracer = otel.NoOpTracer()
        """Starts the spans; one that records nothing until a tracer opens the attempt."""
        self.dropped_spans = 0
        """Spans beyond `max_spans`; the root span is always kept."""
        self._lock = threading.Lock()
        self._spans: list[ReadableSpan] = []
        self._last_sequence_id = 0
        self._num_calls = 0
        self._closed = False
        self._stored_ids: dict[int, int] = {}
        """Sequence ids that a store gave, by span id."""
        self._on_end: Callable[[], None] | None = None
        self._before_close: dict[object, Callable[[], None]] | None = {}
        """None once they were called."""

    def start_span(
        self,
        name: str,
        context: otel_context.Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Span:
        """Start a span of this attempt, with OpenTelemetry's arguments; the caller ends it."""
        ids = {semconv.ROLLOUT_ID: self.rollout_id, semconv.ATTEMPT_ID: self.attempt_id}
        context = self._context() if context is None else context
        attributes = {**(attributes or {}), **ids}
        return self.tracer.start_span(name, context, kind, attributes, *args, **kwargs)

    @_agnosticcontextmanager
    def start_as_current_span(
        self, name: str, *args: Any, end_on_exit: bool = True, **kwargs: Any
    ) -> Iterator[Span]:
        """Start a span of this attempt that is the current one in the block."""
        with otel.use_span(
            self.start_span(name, *args, **kwargs),
            end_on_exit=end_on_exit,
            record_exception=kwargs.get("record_exception", True),
            set_status_on_exception=kwargs.get("set_status_on_exception", True),
        ) as span:
            yield span

    def _context(self) -> otel_context.Context | None:
        """Return the attempt's root as the parent where the current span is of another trace."""
        trace_id = self.root.get_span_context().trace_id
        if otel.get_current_span().get_span_context().trace_id == trace_id:
            return None
        return otel.set_span_in_context(self.root)

    def spans(self) -> list[ReadableSpan]:
        """Return the spans that ended so far, in that order; all of them once closed."""
        with self._lock:
            return list(self._spans)

    def recorded(self) -> list[SpanRecord]:
        """Return the same spans as records, with the sequence ids of the store if it gave some."""
        return [self.record(span) for span in self.spans()]

    def record(self, span: ReadableSpan) -> SpanRecord:
        """Return one of the spans as a record; its fields have the ids, not its attributes."""
        number = self._stored_ids.get(span_id(span), local_sequence_id(span))
        record = SpanRecord.from_opentelemetry(span, self.rollout_id, self.attempt_id, number)
        for name in (semconv.ROLLOUT_ID, semconv.ATTEMPT_ID, semconv.SEQUENCE_ID):
            record.attributes.pop(name, None)
        return record

    def is_numbered(self, span: ReadableSpan) -> bool:
        """Say whether a store gave the span a sequence id."""
        return span_id(span) in self._stored_ids

    def number(self, span: ReadableSpan, sequence_id: int) -> None:
        """Note the sequence id that a store gave a span."""
        self._stored_ids[span_id(span)] = sequence_id

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call a listener after each span that ends, in the thread where it does."""
        self._on_end = listener

    def before_close(self, end_span: Callable[[], None]) -> Callable[[], None]:
        """Call a function that ends a span when the attempt ends; at once where it is ending.

        Returns:
            What forgets the function, once its span has ended.
        """
        key = object()
        with self._lock:
            waiting = self._before_close
            if waiting is not None:
                waiting[key] = end_span
        if waiting is None:
            end_span()
            return lambda: None

        def forget() -> None:
            with self._lock:
                waiting.pop(key, None)

        return forget

    def end_open_spans(self) -> None:
        """Call what `before_close` was given and has not been forgotten."""
        with self._lock:
            functions, self._before_close = self._before_close or {}, None
            waiting = list(functions.values())
        for end_span in waiting:
            end_span()

    def fail(self, description: str) -> None:
        """Mark the root span as failed."""
        self.root.set_status(Status(StatusCode.ERROR, description))

    def next_sequence_id(self) -> int:
        """Return the next 1-based number of a span of this attempt."""
        with self._lock:
            self._last_sequence_id += 1
            return self._last_sequence_id

    def next_call_index(self) -> int:
        """Return the next 0-based number of a model call of this attempt."""
        with self._lock:
            self._num_calls += 1
            return self._num_calls - 1

    def add(self, span: ReadableSpan) -> bool:
        """Keep a span that ended, or count it beyond the limit; False if the attempt is closed."""
        with self._lock:
            if self._closed:
                return False
            is_root = span.get_span_context() == self.root.get_span_context()
            kept = len(self._spans) < self.max_spans or is_root
            if kept:
                self._spans.append(span)
            else:
                self.dropped_spans += 1
            is_first_dropped = not kept and self.dropped_spans == 1
        if kept and self._on_end is not None:
            self._on_end()
        if is_first_dropped:
            logger.warning(
                "more than %d spans, further ones are dropped: rollout=%s attempt=%s first=%s",
                self.max_spans,
                self.rollout_id,
                self.attempt_id,
                span.name,
            )
        return True

    @property
    def is_closed(self) -> bool:
        """Whether the attempt has ended."""
        with self._lock:
            return self._closed

    def close(self) -> None:
        """Accept no more spans."""
        with self._lock:
            self._closed = True
        if self.dropped_spans:
            logger.warning(
                "%d spans were dropped beyond the limit of %d: rollout=%s attempt=%s",
                self.dropped_spans,
                self.max_spans,
                self.rollout_id,
                self.attempt_id,
            )


class ForeignTrace(AttemptTrace):
    """An attempt that a tracer records in a way of its own.

    Args:
        rollout_id: The rollout.
        attempt_id: The attempt of that rollout.
        last_trace: Returns what the tracer recorded of it.
    """

    def __init__(
        self, rollout_id: str, attempt_id: str, last_trace: Callable[[], list[Any]]
    ) -> None:
        super().__init__(rollout_id, attempt_id, max_spans=0)
        self._last_trace = last_trace

    def spans(self) -> list[Any]:
        """Return the tracer's spans, in its own form and order."""
        return list(self._last_trace())

    def record(self, span: Any) -> SpanRecord:
        """Return one of the spans as a record."""
        return span if isinstance(span, SpanRecord) else super().record(span)


def local_sequence_id(span: ReadableSpan) -> int:
    """Return the number that a span got when it started; 0 if it has none."""
    number = (span.attributes or {}).get(semconv.SEQUENCE_ID)
    return number if isinstance(number, int) else 0


def span_id(span: ReadableSpan) -> int:
    """Return a recorded span's id."""
    context = span.get_span_context()
    assert context is not None, "a span that was recorded has a context"
    return context.span_id
