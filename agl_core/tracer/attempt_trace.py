"""The spans of one attempt, kept in memory while it runs: numbered, bounded, closed once."""

import logging
import threading

from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span, Status, StatusCode

logger = logging.getLogger(__name__)


class OtelAttemptTrace:
    """The spans of one attempt; safe to use from several threads."""

    def __init__(self, rollout_id: str, attempt_id: str, max_spans: int) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.max_spans = max_spans
        self.root: Span = otel.INVALID_SPAN
        self.dropped_spans = 0
        """Spans beyond `max_spans`; the root span is always kept."""
        self._lock = threading.Lock()
        self._spans: list[ReadableSpan] = []
        self._last_sequence_id = 0
        self._num_calls = 0
        self._closed = False

    def spans(self) -> list[ReadableSpan]:
        """Return the spans that ended so far, in that order; all of them once closed."""
        with self._lock:
            return list(self._spans)

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
            if len(self._spans) < self.max_spans or is_root:
                self._spans.append(span)
                return True
            self.dropped_spans += 1
            if self.dropped_spans > 1:
                return True
        logger.warning(
            "more than %d spans, further ones are dropped: rollout=%s attempt=%s first=%s",
            self.max_spans,
            self.rollout_id,
            self.attempt_id,
            span.name,
        )
        return True

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
