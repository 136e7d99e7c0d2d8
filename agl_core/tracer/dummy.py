"""A tracer that keeps nothing, for agents that are run for their return value or in tests."""

import itertools
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.trace import Span

from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.base import ModelCall, Tracer
from agl_core.tracer.current import CurrentAttempt, current_attempt


class DummyTracer(Tracer):
    """Let emitters and operations succeed, inside and outside of attempts, and record nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = itertools.count()

    def __reduce__(self) -> Any:
        """Start afresh in another process."""
        return type(self), ()

    @contextmanager
    def attempt(
        self, rollout_id: str, attempt_id: str, *, name: str | None = None
    ) -> Generator[AttemptTrace]:
        """Open an attempt whose trace stays empty."""
        del name
        current = current_attempt.set(CurrentAttempt(self, rollout_id, attempt_id))
        trace = AttemptTrace(rollout_id, attempt_id, max_spans=0)
        try:
            yield trace
        finally:
            trace.close()
            with suppress(ValueError):  # left in another task than it was entered in
                current_attempt.reset(current)

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
    ) -> Span:
        """Return a span that records nothing."""
        del name, attributes, start_time
        return otel.INVALID_SPAN

    def start_call(self, rollout_id: str, attempt_id: str) -> ModelCall:
        """Return a call whose span records nothing, numbered over all attempts."""
        del rollout_id, attempt_id
        return ModelCall(otel.INVALID_SPAN, next(self._calls))
