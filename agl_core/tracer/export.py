"""The way of an attempt's spans to a store: in batches, in the background, all of them at the end.

    span ends --> kept in the attempt's trace --> wakes the exporter's task (no thread waits for it)
    every window: ids for the batch, then the batch   two calls to the store, whatever its size
    attempt ends: the rest, retried until a deadline, else an error

The store numbers the spans (its sequence ids order them among those that others write, such as a
proxy elsewhere); within a batch they are in the order in which they started. What waits to be sent
is what the trace keeps, so its limit bounds it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.errors import StoreError, TransientError
from agl_core.store.base import LightningStore
from agl_core.tracer.attempt_trace import AttemptTrace, local_sequence_id

logger = logging.getLogger(__name__)

_REFUSALS = (ValueError, TypeError, NotImplementedError)
"""Errors of a store that another try does not change."""
_MAX_BACKOFF_SECONDS = 5.0


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
        self._task = asyncio.create_task(self._run(trace))

    async def finish(self) -> None:
        """Send what is left and return when it is stored.

        Raises:
            StoreError: The store refuses it.
            TransientError: It could not be stored before the deadline.
        """
        if self._task is None:
            return
        self._closing.set()
        self._wake.set()
        await self._task

    async def _run(self, trace: AttemptTrace) -> None:
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
                    return await self._send(trace)
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

    async def _send(self, trace: AttemptTrace) -> None:
        """Send all spans that ended and were not sent, batch by batch."""
        while batch := trace.spans()[self._num_sent : self._num_sent + self._batch_spans]:
            await self._number(trace, batch)
            await self._store.add_many_spans([trace.record(span) for span in batch])
            self._num_sent += len(batch)

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

    def _loss(self, trace: AttemptTrace) -> str:
        spans = trace.spans()
        return (
            f"{len(spans) - self._num_sent} of {len(spans)} spans of rollout {trace.rollout_id}, "
            f"attempt {trace.attempt_id}"
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
