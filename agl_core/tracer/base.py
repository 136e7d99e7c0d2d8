"""What a tracer promises: attempts, spans in them, and their way to a store.

A tracer implements three things (`attempt`, `start_span`, `start_call`); what users and emitters
call is built on them here. Many attempts may be open at once. One that overrides `trace_context`
alone, as Agent Lightning allows, runs too: what it yields is its own, and it stores its spans
itself; emitters and the recording proxy need the three.
"""

import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from opentelemetry import trace as otel
from opentelemetry.trace import Span as OtelSpan

from agl_core.errors import AglError, TraceError
from agl_core.store.base import LightningStore
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.current import clear_active_tracer as clear_active_tracer
from agl_core.tracer.current import get_active_tracer as get_active_tracer
from agl_core.tracer.current import set_active_tracer as set_active_tracer
from agl_core.tracer.export import SpanExporter
from agl_core.tracer.recording import SpanRecording, set_status, to_nanoseconds
from agl_core.types.core import ParallelWorkerBase
from agl_core.types.tracer import Span, SpanCoreFields, TraceStatus

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


_last_trace: ContextVar["tuple[Tracer, AttemptTrace] | None"] = ContextVar(
    "agl_last_trace", default=None
)
"""What this task or thread recorded last."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call that the proxy is serving."""

    span: OtelSpan
    """Started as a child of the attempt's root span; whoever asked for it ends it."""
    index: int
    """0-based number of the call within its attempt, in order of arrival."""
    before_close: Callable[[Callable[[], None]], Callable[[], None]] = lambda end_span: lambda: None
    """Takes a function that ends the span, to be called if the attempt ends before; gives one that
    forgets it."""


class Tracer(ParallelWorkerBase):
    """Records the spans of many attempts at once."""

    def __init__(self) -> None:
        self._store: LightningStore | None = None
        self._last_trace: AttemptTrace | None = None

    def attempt(
        self, rollout_id: str, attempt_id: str, *, name: str | None = None
    ) -> AbstractContextManager[AttemptTrace]:
        """Open an attempt: inside the context, spans are recorded for it, in memory.

        Args:
            rollout_id: The rollout.
            attempt_id: The attempt of that rollout.
            name: Of the root span, instead of `agentlightning.rollout`.

        Raises:
            ValueError: The same attempt is open already.
        """
        raise self._not_implemented("attempt")

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
    ) -> OtelSpan:
        """Start a span of the current attempt, below the current span; the caller ends it.

        Args:
            name: Of the span.
            attributes: What is known at its start.
            start_time: In UTC epoch seconds; None for now.
        """
        raise self._not_implemented("start_span")

    def start_call(self, rollout_id: str, attempt_id: str) -> ModelCall:
        """Start the span of a model call by the attempt's ids, from any thread.

        Raises:
            TraceError: No such attempt is open, or the tracer records no calls.
        """
        raise TraceError(
            f"{type(self).__name__} does not implement start_call, so the recording proxy cannot "
            "record model calls with it; use OtelTracer, or implement it"
        )

    def _not_implemented(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not implement {method}")

    # For runners.

    def init_worker(
        self, worker_id: int, store: LightningStore | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Set up in one worker.

        Args:
            worker_id: Number of the worker, from 0.
            store: Where attempts go whose `trace_context` names no other.
            args: Not used.
            kwargs: Not used.
        """
        super().init_worker(worker_id, *args, **kwargs)
        self._store = store

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`, when the last worker is done."""
        super().teardown(*args, **kwargs)
        self._store = None

    @contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Generator[None]:
        """Set the tracer up for one worker and undo it at the end, for use outside of a runner."""
        self.init()
        try:
            self.init_worker(0, store)
            try:
                yield
            finally:
                self.teardown_worker(0)
        finally:
            self.teardown()

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncGenerator[AttemptTrace]:
        """Record an attempt and send its spans to the store, in the background while it runs and
        the rest when it ends.

        Args:
            name: Of the root span, instead of `agentlightning.rollout`.
            store: Instead of the one of `init_worker`.
            rollout_id: The rollout.
            attempt_id: The attempt of that rollout. Without both ids the spans stay in memory, for
                `get_last_trace`.

        Raises:
            ValueError: One id is given without the other, or the same attempt is open already.
            StoreError: The store refuses the attempt's spans.
            TransientError: They could not be stored in time.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError(
                "rollout_id and attempt_id must be either all provided or all "
                "None: rollout_id and attempt_id must be given together or not at all"
            )
        store = store or self._store
        if rollout_id is None or attempt_id is None:
            rollout_id, attempt_id = _own_ids()
            store = None
        if store is None:
            with self._remembered_attempt(rollout_id, attempt_id, name) as trace:
                yield trace
            return
        exporter = SpanExporter(store)
        try:
            with self._remembered_attempt(rollout_id, attempt_id, name) as trace:
                exporter.start(trace)
                yield trace
        except BaseException:  # whatever ends the attempt, also SystemExit
            try:
                await exporter.finish()
            except AglError:  # what ended the attempt is the news
                logger.exception("spans were lost: rollout=%s attempt=%s", rollout_id, attempt_id)
            raise
        await exporter.finish()

    def trace_run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function and record it; `get_last_trace` has the spans."""
        with self._remembered_attempt(*_own_ids(), _name_of(function)):
            return function(*args, **kwargs)

    async def trace_run_async(
        self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call an async function and record it; `get_last_trace` has the spans."""
        async with self.trace_context(_name_of(function)):
            return await function(*args, **kwargs)

    def get_last_trace(self) -> list[Span]:
        """Return the spans of the attempt that this task or thread is recording, else of the one it
        recorded last; where it recorded none, of the one begun last anywhere.
        """
        here = _last_trace.get()
        trace = here[1] if here and here[0] is self else self._last_trace
        return trace.recorded() if trace else []

    def get_langchain_handler(self) -> Any:
        """There is none: calls of LangChain's OpenAI models are recorded by their client.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "there is no LangChain handler; the calls of its OpenAI models are recorded without one"
        )

    @contextmanager
    def _remembered_attempt(
        self, rollout_id: str, attempt_id: str, name: str | None
    ) -> Generator[AttemptTrace]:
        """Open an attempt that is the last trace; after it, the one around it is that again."""
        outer, outer_anywhere = _last_trace.get(), self._last_trace
        with self.attempt(rollout_id, attempt_id, name=name) as trace:
            self._last_trace = trace
            _last_trace.set((self, trace))
            try:
                yield trace
            finally:
                if outer is not None and not outer[1].is_closed:
                    _last_trace.set(outer)
                    if outer[1] is outer_anywhere:
                        self._last_trace = outer_anywhere

    # For emitters.

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span without duration in the current attempt and return what it records.

        Args:
            name: Of the span.
            attributes: What it records.
            timestamp: In UTC epoch seconds; None for now.
            status: None for UNSET.
        """
        now = time.time() if timestamp is None else timestamp
        status = status or TraceStatus()
        span = self.start_span(name, attributes, now)
        set_status(span, status.status_code, status.description)
        span.end(to_nanoseconds(now))
        return SpanCoreFields(
            name=name,
            attributes=dict(attributes or {}),
            start_time=now,
            end_time=now,
            status=status,
        )

    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Generator[SpanRecording]:
        """Record what happens inside as one span, the parent of the spans in it.

        Args:
            name: Of the span.
            attributes: What is known at its start.
            start_time: In UTC epoch seconds; None for now.
            end_time: None for when the context ends.
        """
        start_time = time.time() if start_time is None else start_time
        core = SpanCoreFields(name=name, attributes=dict(attributes or {}), start_time=start_time)
        recording = SpanRecording(self.start_span(name, attributes, start_time), core)
        try:
            with otel.use_span(
                recording.span, record_exception=False, set_status_on_exception=False
            ):
                yield recording
        except BaseException as error:
            recording.record_exception(error)
            raise
        finally:
            recording.finalize(end_time)


def with_active_tracer_context(
    method: Callable[..., AbstractAsyncContextManager[T]],
) -> Callable[..., AbstractAsyncContextManager[T]]:
    """Decorate the `trace_context` of a tracer of one's own: inside the block, the tracer records
    what the running code emits.
    """

    @functools.wraps(method)
    @asynccontextmanager
    async def decorated(self: Tracer, *args: Any, **kwargs: Any) -> AsyncGenerator[T]:
        is_active = get_active_tracer() is not None
        if not is_active:
            set_active_tracer(self)
        try:
            async with method(self, *args, **kwargs) as given:
                yield given
        finally:
            if not is_active:
                clear_active_tracer()

    return decorated


def _own_ids() -> tuple[str, str]:
    """Return ids for a trace that belongs to no rollout."""
    return f"ro-{secrets.token_hex(6)}", f"at-{secrets.token_hex(4)}"


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
