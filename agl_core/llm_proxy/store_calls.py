"""Records calls of attempts that run elsewhere, in a store.

    call ends --> waits in memory (bounded) --> a task in the proxy's event loop: one batch of
                                                sequence ids and one of spans every 0.2 s

A store that is away is tried again; meanwhile calls wait, and above a limit new ones are refused.
An attempt whose spans the store refuses (an unknown rollout, say) is refused from then on.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from agl_core import semconv
from agl_core.errors import TraceError, TransientError
from agl_core.store.base import LightningStore
from agl_core.tracer.base import ModelCall
from agl_core.tracer.otel import make_provider
from agl_core.types.tracer import Span

logger = logging.getLogger(__name__)

SEED = "agl_seed"
"""In a rollout's metadata."""
_Key = tuple[str, str]
"""Rollout id, attempt id."""
_MAX_ATTEMPTS = 100_000
"""Attempts whose calls are numbered on; the one that called longest ago begins anew."""
_MAX_PAUSE_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_REFUSALS = (ValueError, TypeError, OverflowError)
"""Errors of a store that another try does not change."""


class StoreCalls:
    """Where a proxy records the calls of any attempt.

    Args:
        store: Used in the event loop of `run`.
        window_seconds: How long spans are gathered for one batch.
        batch_spans: Most spans in one batch.
        max_waiting: Spans that wait for the store; calls beyond are refused.
        reads_seeds: Whether a rollout's calls are seeded by its metadata (`SEED`), which is read
            at its first call.
    """

    def __init__(
        self,
        store: LightningStore,
        *,
        window_seconds: float = 0.2,
        batch_spans: int = 512,
        max_waiting: int = 10_000,
        reads_seeds: bool = False,
    ) -> None:
        self._store = store
        self._window_seconds = window_seconds
        self._batch_spans = batch_spans
        self._max_waiting = max_waiting
        self._reads_seeds = reads_seeds
        self._seeds: OrderedDict[str, int | str] = OrderedDict()
        self._lock = threading.Lock()
        self._num_calls: OrderedDict[_Key, int] = OrderedDict()
        self._refused: OrderedDict[_Key, str] = OrderedDict()
        self._waiting: list[ReadableSpan] = []
        self._num_sent = 0
        """Spans that wait no more, stored or refused."""
        self._sequence_ids: dict[int, int] = {}
        """Of spans that wait, by span id, once the store has numbered them."""
        self._otel = make_provider(_Keeper(self._lock, self._waiting)).get_tracer("agl_core")

    def start_call(self, rollout_id: str, attempt_id: str) -> ModelCall:
        """Start the span of a call.

        Raises:
            TraceError: The store refused this attempt's earlier calls.
            TransientError: Too many spans wait for the store.
        """
        key = (rollout_id, attempt_id)
        with self._lock:
            if reason := self._refused.get(key):
                raise TraceError(f"rollout {rollout_id}, attempt {attempt_id}: {reason}")
            if len(self._waiting) >= self._max_waiting:
                raise TransientError(f"{len(self._waiting)} recorded calls wait for the store")
            index = self._num_calls.get(key, 0)
            _set_bounded(self._num_calls, key, index + 1)
        span = self._otel.start_span(
            semconv.LLM_CALL_SPAN,
            attributes={
                semconv.ROLLOUT_ID: rollout_id,
                semconv.ATTEMPT_ID: attempt_id,
                semconv.CALL_INDEX: index,
            },
        )
        return ModelCall(span, index)

    async def rollout_seed(self, rollout_id: str) -> int | str:
        """Return what the calls of a rollout are seeded by: its id, unless its metadata says it.

        Raises:
            TransientError: The store is away.
        """
        if not self._reads_seeds:
            return rollout_id
        if rollout_id not in self._seeds:
            rollout = await self._store.get_rollout_by_id(rollout_id)
            seed = (rollout.metadata or {}).get(SEED) if rollout is not None else None
            _set_bounded(self._seeds, rollout_id, rollout_id if seed is None else seed)
        return self._seeds[rollout_id]

    async def run(self) -> None:
        """Send what is recorded, until cancelled."""
        pause = self._window_seconds
        while True:
            await asyncio.sleep(pause)
            try:
                await self._send_waiting()
                pause = self._window_seconds
            except Exception as error:  # noqa: BLE001 - whatever a store raises where it is away
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
                logger.warning("recorded calls not stored yet, will try again: %s", error)

    async def finish(self, deadline_seconds: float = 30.0) -> None:
        """Send what is left.

        Raises:
            TransientError: It could not be stored before the deadline.
        """
        end = time.monotonic() + deadline_seconds
        while self._waiting:
            reason: Exception | None = None
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    await self._send_waiting()
            except Exception as error:  # noqa: BLE001 - told at the deadline
                reason = error
            if self._waiting and time.monotonic() + self._window_seconds > end:
                raise TransientError(
                    f"{len(self._waiting)} recorded calls could not be stored within "
                    f"{deadline_seconds:g} s: {reason or 'too slow'}"
                ) from reason
            await asyncio.sleep(self._window_seconds if self._waiting else 0.0)

    async def flush(self, deadline_seconds: float) -> None:
        """Return once all calls that have ended are in the store; from any event loop.

        Raises:
            TransientError: They were not before the deadline.
        """
        with self._lock:
            wanted = self._num_sent + len(self._waiting)
        end = time.monotonic() + deadline_seconds
        while self._num_sent < wanted:
            if time.monotonic() > end:
                raise TransientError(
                    f"{wanted - self._num_sent} recorded calls were not stored within "
                    f"{deadline_seconds:g} s"
                )
            await asyncio.sleep(_LOOK_SECONDS)

    async def _send_waiting(self) -> None:
        """Send all that waits, batch by batch; a batch stays where it fails."""
        while batch := self._waiting[: self._batch_spans]:
            await self._send(batch)
            with self._lock:
                del self._waiting[: len(batch)]
                self._num_sent += len(batch)
            for span in batch:
                self._sequence_ids.pop(_span_id(span), None)

    async def _send(self, batch: Sequence[ReadableSpan]) -> None:
        """Store a batch; what of it is refused is dropped with its reason."""
        try:
            new = [span for span in batch if _span_id(span) not in self._sequence_ids]
            if new:
                ids = await self._store.get_many_span_sequence_ids([_key(span) for span in new])
                for span, number in zip(new, ids, strict=True):
                    self._sequence_ids[_span_id(span)] = number
            await self._store.add_many_spans([self._record(span) for span in batch])
        except _REFUSALS as error:
            if len(batch) > 1:
                half = len(batch) // 2
                await self._send(batch[:half])
                await self._send(batch[half:])
                return
            self._refuse(batch[0], error)

    def _refuse(self, span: ReadableSpan, error: Exception) -> None:
        rollout_id, attempt_id = _key(span)
        reason = f"the store refused to record a call: {error}"
        logger.error("a call is lost, rollout=%s attempt=%s: %s", rollout_id, attempt_id, reason)
        with self._lock:
            _set_bounded(self._refused, (rollout_id, attempt_id), reason)

    def _record(self, span: ReadableSpan) -> Span:
        record = Span.from_opentelemetry(span, *_key(span), self._sequence_ids[_span_id(span)])
        for name in (semconv.ROLLOUT_ID, semconv.ATTEMPT_ID):
            record.attributes.pop(name, None)
        return record


class _Keeper(SpanProcessor):
    """Keeps spans that end."""

    def __init__(self, lock: threading.Lock, waiting: list[ReadableSpan]) -> None:
        self._lock = lock
        self._waiting = waiting

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            self._waiting.append(span)


def _set_bounded(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > _MAX_ATTEMPTS:
        table.popitem(last=False)


def _key(span: ReadableSpan) -> _Key:
    attributes = span.attributes or {}
    return str(attributes[semconv.ROLLOUT_ID]), str(attributes[semconv.ATTEMPT_ID])


def _span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None, "a span that was recorded has a context"
    return context.span_id
