"""What a tracer promises, and which attempt the running code belongs to.

The current attempt lives in one context variable: it follows `await`, new asyncio tasks, and
threads that run in a copied context. There is no active tracer per process, so many attempts run at
once in one process.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span

AttributeValue = Any
"""A primitive or a sequence of primitives, as OpenTelemetry defines it."""


class AttemptTrace(Protocol):
    """The spans of one attempt."""

    rollout_id: str
    attempt_id: str

    def spans(self) -> list[ReadableSpan]:
        """Return the spans that ended so far, in that order; all of them once closed."""
        ...

    def fail(self, description: str) -> None:
        """Mark the attempt's root span as failed."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call that the proxy is serving."""

    span: Span
    """Started as a child of the attempt's root span; whoever asked for it ends it."""
    index: int
    """0-based number of the call within its attempt, in order of arrival."""


class Tracer(ABC):
    """Records the spans of many attempts at once."""

    @abstractmethod
    def attempt(self, rollout_id: str, attempt_id: str) -> AbstractContextManager[AttemptTrace]:
        """Open an attempt: inside the context, spans are recorded for it.

        Raises:
            ValueError: The same attempt is open already.
        """

    @abstractmethod
    def start_span(self, name: str, attributes: Mapping[str, AttributeValue] | None = None) -> Span:
        """Start a span of the current attempt, below the current span; the caller ends it."""

    @abstractmethod
    def start_call(self, rollout_id: str, attempt_id: str) -> ModelCall:
        """Start the span of a model call by the attempt's ids, from any thread.

        Raises:
            TraceError: No such attempt is open.
        """

    def create_span(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None
    ) -> ReadableSpan:
        """Record a span without duration in the current attempt and return it."""
        span = self.start_span(name, attributes)
        span.end()
        assert isinstance(span, ReadableSpan)
        return span


@dataclass(frozen=True, slots=True)
class CurrentAttempt:
    """The attempt that the running code belongs to."""

    tracer: Tracer
    rollout_id: str
    attempt_id: str


_current_attempt: ContextVar[CurrentAttempt | None] = ContextVar(
    "agl_current_attempt", default=None
)


def get_current_attempt() -> CurrentAttempt | None:
    """Return the attempt of the running code, or None outside of any."""
    return _current_attempt.get()


def get_active_tracer() -> Tracer | None:
    """Return the tracer that records the running code's attempt, or None outside of any."""
    current = _current_attempt.get()
    return current.tracer if current else None
