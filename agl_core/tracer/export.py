"""The way of an attempt's spans to a store: in batches, in the background, all of them at the end.

    span ends --> kept in the attempt's trace --> wakes the exporter's task (no thread waits for it)
    every window: ids for the batch, then the batch   two calls to the store, whatever its size
    attempt ends: the rest, retried until a deadline, else an error

A batch that the store refuses is halved again and again, so that only the spans that it refuses are
lost, by name; from the 20th on the rest of the batch goes with them.

The store numbers the spans (its sequence ids order them among those that others write, such as a
proxy elsewhere); within a batch they are in the order in which they started. What waits to be sent
is what the trace keeps, so its limit bounds it.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.errors import StoreError, TransientError
from agl_core.store.base import LightningStore
from agl_core.tracer.attempt_trace import AttemptTrace, local_sequence_id, span_id

logger = logging.getLogger(__name__)

_REFUSALS = (ValueError, TypeError, OverflowError, NotImplementedError)
"""Errors of a store that another try does not change."""
_MAX_BACKOFF_SECONDS = 5.0
_MAX_REFUSED = 20
"""Spans of an attempt that are found and named; a store that refuses more refuses the attempt."""


class SpanExporter:
    """Sends the spans of one attempt to a store while it runs.

    Args:
        store: Used in the event loop that starts the exporter.
        window_seconds: How long spans are gathered for one batch.
        batch_spans: Most spans in one call.
        deadline_seconds: Limit of one call while the attempt runs, and of all that is sent after
            it.
    """

    def __init__(
        self,
        store: LightningStore,
        *,
        window_seconds: float = 0.2,
        batch_spans: int = 512,
        deadline_seconds: float = 30.0,
    ) -> None:
        self._store = store
        self._window_seconds = window_seconds
        self._batch_spans = batch_spans
        self._deadline_seconds = deadline_seconds
        self._num_sent = 0
        self._stored: set[int] = set()
        """Span ids."""
        self._refused: dict[int, str] = {}
        """Names and reasons by span id."""
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, trace: AttemptTrace) -> None:
        """Begin to send the spans of an attempt."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            if not self._wake.is_set():
                with suppress(RuntimeError):  # the loop is closed, the process about to end
                    loop.call_soon_threadsafe(self._wake.set)

        trace.on_end(wake)
        # Without the attempt's context: what the store's client records is no part of the attempt.
        self._task = asyncio.create_task(self._run(trace), context=contextvars.Context())

    async def finish(self) -> None:
        """Send what is left and return when it is stored.

        Who is cancelled here still waits for it, until the deadline; cancelled again, he does not.

        Raises:
            StoreError: The store refuses it, or some of it.
            TransientError: It could not be stored before the deadline.
        """
        if self._task is None:
            return
        self._closing.set()
        self._wake.set()
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            await self._finish_cancelled(self._task)
            raise

    async def _finish_cancelled(self, task: asyncio.Task[None]) -> None:
        """Wait for the task until the deadline; what it could not send is in the log."""
        try:
            await asyncio.wait([task], timeout=self._deadline_seconds)
        finally:
            if not task.done():
                task.cancel()  # says what is lost
            elif not task.cancelled() and (error := task.exception()):
                logger.error("spans were lost: %s", error)

    async def _run(self, trace: AttemptTrace) -> None:
        try:
            await self._send_all(trace)
        except asyncio.CancelledError:
            if self._num_lost(trace):
                logger.error("spans were lost, cancelled: %s", self._loss(trace))
            raise

    async def _send_all(self, trace: AttemptTrace) -> None:
        """Send one batch after another until told to finish, then the rest."""
        pause = self._window_seconds
        while not self._closing.is_set():
            await self._wake.wait()
            await self._pause(pause)
            self._wake.clear()
            try:
                async with asyncio.timeout(self._deadline_seconds):
                    await self._send(trace)
                pause = self._window_seconds
            except Exception as error:  # noqa: BLE001 - whatever a store raises; raised at the end
                pause = min(2 * pause, _MAX_BACKOFF_SECONDS)
                self._wake.set()
                _warn(trace, error)
        await self._send_rest(trace)

    async def _send_rest(self, trace: AttemptTrace) -> None:
        """Send what is left, again and again until the deadline."""
        started, pause = time.monotonic(), self._window_seconds
        while True:
            left = self._deadline_seconds - (time.monotonic() - started)
            try:
                async with asyncio.timeout(left):
                    await self._send(trace)
                break
            except _REFUSALS as error:
                raise StoreError(f"{self._loss(trace)} were refused: {error}") from error
            except Exception as error:
                if time.monotonic() - started + pause > self._deadline_seconds:
                    raise TransientError(
                        f"{self._loss(trace)} could not be stored within "
                        f"{self._deadline_seconds:g} s: {_reason(error)}"
                    ) from error
                _warn(trace, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_BACKOFF_SECONDS)
        if self._refused:
            reasons = "; ".join(self._refused.values())
            raise StoreError(f"{self._loss(trace)} were refused: {reasons}")

    async def _send(self, trace: AttemptTrace) -> None:
        """Send all spans that ended and were not sent, batch by batch."""
        while batch := trace.spans()[self._num_sent : self._num_sent + self._batch_spans]:
            await self._number(trace, batch)
            await self._add(trace, [s for s in batch if span_id(s) not in self._refused])
            self._num_sent += len(batch)

    async def _add(self, trace: AttemptTrace, batch: Sequence[ReadableSpan]) -> None:
        """Store numbered spans; of a batch that is refused, those that are not refused alone."""
        if not batch:
            return
        try:
            await self._store.add_many_spans([trace.record(span) for span in batch])
        except _REFUSALS as error:
            if len(batch) > 1:
                half = len(batch) // 2
                await self._add(trace, batch[:half])
                await self._add(trace, batch[half:])
                return
            if len(self._refused) + 1 >= _MAX_REFUSED:
                raise
            self._refused[span_id(batch[0])] = f"{batch[0].name!r:.80}: {error!s:.200}"
            _warn_refused(trace, batch[0], error)
        else:
            self._stored.update(map(span_id, batch))

    async def _number(self, trace: AttemptTrace, batch: Sequence[ReadableSpan]) -> None:
        """Have the store number the spans; a batch that is sent again keeps its numbers."""
        new = sorted((span for span in batch if not trace.is_numbered(span)), key=local_sequence_id)
        if not new:
            return
        ids = await self._store.get_many_span_sequence_ids(
            [(trace.rollout_id, trace.attempt_id)] * len(new)
        )
        for span, sequence_id in zip(new, ids, strict=True):
            trace.number(span, sequence_id)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until told to finish."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _num_lost(self, trace: AttemptTrace) -> int:
        return len(trace.spans()) - len(self._stored)

    def _loss(self, trace: AttemptTrace) -> str:
        return (
            f"{self._num_lost(trace)} of {len(trace.spans())} spans of rollout {trace.rollout_id}, "
            f"attempt {trace.attempt_id}"
        )


def _warn_refused(trace: AttemptTrace, span: ReadableSpan, error: Exception) -> None:
    logger.warning(
        "the store refuses a span: name=%r rollout=%s attempt=%s: %s",
        span.name,
        trace.rollout_id,
        trace.attempt_id,
        error,
    )


def _warn(trace: AttemptTrace, error: Exception) -> None:
    logger.warning(
        "spans not stored yet, will try again: rollout=%s attempt=%s: %s",
        trace.rollout_id,
        trace.attempt_id,
        _reason(error),
    )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
