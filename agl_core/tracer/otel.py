"""An OpenTelemetry tracer for many attempts at once.

It owns its `TracerProvider` and never installs it globally. A span belongs to the attempt that its
id attributes name, else to the current one (`agl_core.tracer.base`). Each gets the attempt's ids
and a sequence id when it starts, and is kept in memory, in the order of ends, until the attempt is
closed. Nothing is lost silently: spans that end after that, or beyond the limit, are counted and
named in a warning.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span

from agl_core import semconv
from agl_core.errors import TraceError
from agl_core.store.base import LightningStore
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.base import ModelCall, Tracer
from agl_core.tracer.current import CurrentAttempt, current_attempt, get_current_attempt
from agl_core.tracer.global_provider import install_routing_provider
from agl_core.tracer.openai_calls import instrument_openai, uninstrument_openai
from agl_core.tracer.recording import to_nanoseconds

logger = logging.getLogger(__name__)

_Key = tuple[str, str]
"""Rollout id, attempt id."""


class OtelTracer(Tracer):
    """Record spans per attempt with the OpenTelemetry SDK.

    Args:
        max_spans_per_attempt: Further spans are dropped and counted.
        instrument_openai: Whether, between `init_worker` and `teardown_worker`, the calls of OpenAI
            clients are recorded that do not go through the recording proxy.
    """

    def __init__(
        self, *, max_spans_per_attempt: int = 10_000, instrument_openai: bool = True
    ) -> None:
        super().__init__()
        self.max_spans_per_attempt = max_spans_per_attempt
        self.instrument_openai = instrument_openai
        self.late_spans = 0
        """Spans that ended after their attempt was closed."""
        self.unattributed_spans = 0
        """Spans that belong to no attempt."""
        self.unattributed_calls = 0
        """Calls of OpenAI clients outside of any attempt while some were open; not recorded."""
        self._lock = threading.Lock()
        self._open: dict[_Key, AttemptTrace] = {}
        self.provider = make_provider(_AttemptRouter(self))
        """For instrumentations that want a provider; it is not installed globally."""
        self._otel = self.provider.get_tracer("agl_core")

    def __reduce__(self) -> Any:
        """Start afresh in another process, with the same settings."""
        settings = {
            "max_spans_per_attempt": self.max_spans_per_attempt,
            "instrument_openai": self.instrument_openai,
        }
        return partial(type(self), **settings), ()

    def init_worker(
        self, worker_id: int, store: LightningStore | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Set up in one worker: also for spans by OpenTelemetry's global API, and OpenAI's clients.

        Args:
            worker_id: Number of the worker, from 0.
            store: Where attempts go whose `trace_context` names no other.
            args: Not used.
            kwargs: Not used.
        """
        super().init_worker(worker_id, store, *args, **kwargs)
        if not install_routing_provider():
            logger.warning(
                "OpenTelemetry has a global provider already; what code records by its global API "
                "is not in the attempts"
            )
        if self.instrument_openai:
            instrument_openai(self)

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`; the global provider stays and records nothing outside of attempts."""
        uninstrument_openai(self)
        super().teardown_worker(worker_id, *args, **kwargs)

    @contextmanager
    def attempt(
        self, rollout_id: str, attempt_id: str, *, name: str | None = None
    ) -> Generator[AttemptTrace]:
        """Open an attempt: inside the context, spans are recorded for it, in memory.

        Args:
            rollout_id: The rollout.
            attempt_id: The attempt of that rollout.
            name: Of the root span, instead of `agentlightning.rollout`.

        Raises:
            ValueError: The same attempt is open already.
        """
        trace = AttemptTrace(rollout_id, attempt_id, self.max_spans_per_attempt)
        with self._lock:
            if (rollout_id, attempt_id) in self._open:
                raise ValueError(f"rollout {rollout_id}, attempt {attempt_id} is open already")
            self._open[rollout_id, attempt_id] = trace
        current = current_attempt.set(CurrentAttempt(self, rollout_id, attempt_id))
        try:
            # An empty parent context: the attempt is the root of its own trace, whatever is around.
            trace.root = self._otel.start_span(
                name or semconv.ROLLOUT_SPAN, otel_context.Context(), attributes=_here()
            )
            trace.tracer = self._otel
            with otel.use_span(trace.root, end_on_exit=True):
                try:
                    yield trace
                finally:
                    trace.end_open_spans()
        finally:
            with self._lock:
                del self._open[rollout_id, attempt_id]
            trace.close()
            with suppress(ValueError):  # left in another task than it was entered in
                current_attempt.reset(current)

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
    ) -> Span:
        """Start a span of the current attempt, below the current span; the caller ends it.

        Args:
            name: Of the span.
            attributes: What is known at its start.
            start_time: In UTC epoch seconds; None for now.
        """
        return self._otel.start_span(
            name,
            self._parent_context(),
            attributes=attributes,
            start_time=None if start_time is None else to_nanoseconds(start_time),
        )

    def start_call(self, rollout_id: str, attempt_id: str) -> ModelCall:
        """Start the span of a model call by the attempt's ids, from any thread.

        Raises:
            TraceError: No such attempt is open.
        """
        trace = self.find_open(rollout_id, attempt_id)
        if trace is None:
            raise TraceError(f"rollout {rollout_id}, attempt {attempt_id} is not running here")
        index = trace.next_call_index()
        span = self._otel.start_span(
            semconv.LLM_CALL_SPAN,
            otel.set_span_in_context(trace.root, otel_context.Context()),
            attributes={
                semconv.ROLLOUT_ID: rollout_id,
                semconv.ATTEMPT_ID: attempt_id,
                semconv.CALL_INDEX: index,
            },
        )
        return ModelCall(span, index, trace.before_close)

    def find_open(self, rollout_id: str, attempt_id: str) -> AttemptTrace | None:
        """Return the open attempt with these ids, or None."""
        with self._lock:
            return self._open.get((rollout_id, attempt_id))

    def has_open_attempts(self) -> bool:
        """Say whether any attempt is open."""
        with self._lock:
            return bool(self._open)

    def _parent_context(self) -> otel_context.Context | None:
        """Parent under the attempt's root where the current span is of a foreign trace."""
        current = get_current_attempt()
        trace = self.find_open(current.rollout_id, current.attempt_id) if current else None
        if trace is None:
            return None
        root = trace.root.get_span_context()
        if otel.get_current_span().get_span_context().trace_id == root.trace_id:
            return None
        return otel.set_span_in_context(trace.root)

    def _identify(self, span: SdkSpan) -> None:
        """Give a span that starts the ids of its attempt and a sequence id."""
        key = _ids_of(span)
        if key is None:
            current = get_current_attempt()
            if current is None or current.tracer is not self:
                return
            key = (current.rollout_id, current.attempt_id)
            span.set_attributes({semconv.ROLLOUT_ID: key[0], semconv.ATTEMPT_ID: key[1]})
        trace = self.find_open(*key)
        if trace is not None:
            span.set_attribute(semconv.SEQUENCE_ID, trace.next_sequence_id())

    def _keep(self, span: ReadableSpan) -> None:
        """Hand a span that ended to its attempt, or count it."""
        key = _ids_of(span)
        trace = self.find_open(*key) if key else None
        if trace is not None and trace.add(span):
            return
        with self._lock:
            if key is None:
                self.unattributed_spans += 1
            else:
                self.late_spans += 1
        if key is None:
            logger.warning("span belongs to no attempt, dropped: name=%s", span.name)
        else:
            logger.warning(
                "span ended after its attempt, dropped: name=%s rollout=%s attempt=%s",
                span.name,
                *key,
            )


class _AttemptRouter(SpanProcessor):
    """Tells the tracer when spans start and end."""

    def __init__(self, tracer: OtelTracer) -> None:
        self._tracer = tracer

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        del parent_context
        self._tracer._identify(span)

    def on_end(self, span: ReadableSpan) -> None:
        self._tracer._keep(span)


class _RecordingProvider(TracerProvider):
    """Records also under OTEL_SDK_DISABLED: that is about telemetry, and these spans are data."""

    def __init__(self) -> None:
        unset = (
            SpanLimits.UNSET
        )  # no limit, also none from OTEL_* variables: token ids must arrive whole
        limits = SpanLimits(unset, unset, unset, unset, unset, unset, unset, unset)
        super().__init__(
            sampler=ALWAYS_ON,  # OTEL_TRACES_SAMPLER must not thin out training data either
            resource=Resource({semconv.TRACER_NAME: "otel"}),
            shutdown_on_exit=False,
            span_limits=limits,
        )
        self._disabled = False

    def _handle_fork(self) -> None:
        """Be usable in a forked process.

        OpenTelemetry looks for its process there, with a thread pool, whose own hook may not have
        run yet: the process would hang for ever. Where an attempt ran is in its root span.
        """
        self._tracers_lock = threading.Lock()


def make_provider(processor: SpanProcessor) -> TracerProvider:
    """Return a provider that records everything, whatever OTEL_* variables say.

    Args:
        processor: Told when spans start and end.
    """
    provider = _RecordingProvider()
    provider.add_span_processor(processor)
    return provider


def _here() -> dict[str, Any]:
    """Return where this process runs."""
    return {
        semconv.HOST_NAME: _host_name(),
        semconv.PROCESS_ID: os.getpid(),
        semconv.EXECUTABLE: sys.executable,
    }


@cache
def _host_name() -> str:
    return socket.gethostname()


def _ids_of(span: ReadableSpan) -> _Key | None:
    attributes = span.attributes or {}
    rollout_id, attempt_id = (
        attributes.get(semconv.ROLLOUT_ID),
        attributes.get(semconv.ATTEMPT_ID),
    )
    if isinstance(rollout_id, str) and isinstance(attempt_id, str):
        return rollout_id, attempt_id
    return None
