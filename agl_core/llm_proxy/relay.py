"""Passes a stream on to the agent, event by event, and records its call.

    bytes of the model server -> events -> writer of the agent's dialect -> agent
                                       +-> `StreamedAnswer` -> span

An event leaves before the next one is read. The span ends before the agent gets `[DONE]`, so that
it belongs to the attempt even if that ends at once. Where the stream breaks off, the agent gets an
error event in its dialect's shape, which clients raise; the span has the reason and no token ids.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agl_core.errors import UpstreamError
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.answer_shape import MALFORMED
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.dialect import Dialect
from agl_core.llm_proxy.events import DONE, EventSplitter, StreamEvent
from agl_core.llm_proxy.exchange import safe_header
from agl_core.llm_proxy.record import CallRecord
from agl_core.llm_proxy.refusal import Refusal, while_connected
from agl_core.llm_proxy.stream import StreamedAnswer, find_hole
from agl_core.llm_proxy.upstream import UpstreamStream

_FAREWELL_SECONDS = 5.0
"""How long an agent that reads nothing is waited for after the deadline."""


class StreamedResponse(Response):
    """The answer to a call that asked for a stream.

    Args:
        stream: What the model server sends; closed at the end.
        dialect: The agent's.
        body: The request as the agent sent it.
        num_choices: How many it asked for.
        record: Of the call; ended here, when the answer is complete.
        headers: Of the model server's, to pass on.
    """

    def __init__(
        self,
        stream: UpstreamStream,
        dialect: Dialect,
        body: JsonObject,
        num_choices: int,
        record: CallRecord,
        headers: Mapping[str, str],
    ) -> None:
        media_type = safe_header(stream.headers, "content-type") or "text/event-stream"
        super().__init__(headers={**headers, "content-type": media_type})
        del self.headers["content-length"]
        self._stream = stream
        self._dialect = dialect
        self._writer = dialect.writer(body)
        self._record = record
        self._splitter = EventSplitter()
        self._answer = StreamedAnswer(num_choices)
        self._lock = threading.Lock()
        """Of the answer: the attempt may end, and record it, in another thread."""
        # An agent that left the stream may end its attempt before the proxy sees it leave.
        record.at_end_of_attempt(lambda: self._write_left("the attempt ended before the stream"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the stream on."""
        del scope
        try:
            await while_connected(receive, self._relay(send))
        except Refusal as refusal:
            self._leave(refusal.message)
        except BaseException as error:
            self._end(f"the call was interrupted: {type(error).__name__}")
            raise
        finally:
            await self._stream.close()

    async def _relay(self, send: Send) -> None:
        """Send everything, and an error event where the stream breaks off."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self._stream.deadline):
                async for content in self._stream:
                    taken, failure = self._take_all(self._splitter.add(content))
                    await self._send(send, taken)
                    if failure is not None:
                        break
                else:
                    failure = self._find_end()
        except UpstreamError as error:
            failure = Refusal(502, str(error), "stream_broken")
        except TimeoutError:
            failure = Refusal(504, "the stream did not end before the deadline", "upstream_timeout")
        if failure is None or self._record.has_ended:
            last = self._writer.end(self._splitter.rest())
        else:
            self._end(failure.message)
            last = self._writer.failure(failure)
        async with asyncio.timeout(_FAREWELL_SECONDS):
            await self._send(send, last, is_last=True)

    async def _send(self, send: Send, content: bytes, *, is_last: bool = False) -> None:
        if content or is_last:
            await send({"type": "http.response.body", "body": content, "more_body": not is_last})

    def _take_all(self, events: Sequence[StreamEvent]) -> tuple[bytes, Refusal | None]:
        """Record events; return what the agent gets of them, and why no more can follow."""
        taken: list[bytes] = []
        try:
            for event in events:
                taken.append(self._take(event))
        except MALFORMED as error:
            message = f"the model server sent what is no part of an answer: {error!r}"
            return b"".join(taken), Refusal(502, message, "bad_answer")
        return b"".join(taken), None

    def _take(self, event: StreamEvent) -> bytes:
        """Record one event and return what the agent gets of it."""
        data = event.data()
        if not data:
            return self._writer.other(event)
        if data == DONE:
            self._end(None)
            return self._writer.done(event)
        try:
            chunk: Any = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            self._answer.spoil(f"a chunk is not JSON: {error}")
            return self._writer.other(event)
        self._add(chunk)
        return self._writer.chunk(event, chunk)

    def _add(self, chunk: Any) -> None:
        """Record one chunk."""
        if isinstance(chunk, dict) and "choices" in chunk:
            try:
                chunk = self._dialect.as_chat(chunk)
            except MALFORMED as error:
                self._answer.spoil(f"a chunk is not one of a completion: {error}")
        with self._lock:
            self._answer.add(chunk)

    def _find_end(self) -> Refusal | None:
        """End the span after the last byte, with or without `[DONE]`; return what the agent must be
        told.
        """
        if not self._answer.has_finished:
            return Refusal(502, "the stream ended before the answer did", "stream_broken")
        self._end(None)
        return None

    def _leave(self, reason: str) -> None:
        """End the span where the agent left."""
        self._record.end(lambda: self._write_left(reason))

    def _end(self, reason: str | None) -> None:
        """Record the answer and end the span; once.

        Args:
            reason: Why the stream is not whole; None where it came to its end.
        """
        self._record.end(lambda: self._write(reason))

    def _write_left(self, reason: str) -> None:
        """Record the answer of a stream that was left: maybe the agent had all it wanted."""
        self._write(None if self._answer.has_finished else reason)

    def _write(self, reason: str | None) -> None:
        """Record the answer."""
        with self._lock:
            self._write_answer(reason)

    def _write_answer(self, reason: str | None) -> None:
        if reason is None and not self._answer.has_finished:
            reason = "the stream ended without a finish reason"
        if reason is not None:
            self._answer.spoil(reason)
        recorded = self._recorded()
        if hole := find_hole(recorded):
            self._answer.spoil(hole)
            recorded = self._recorded()
        self._record.answer(recorded, self._answer.defect or capture.find_defect(recorded))

    def _recorded(self) -> dict[str, Any]:
        """Return the span attributes of the answer so far."""
        answer = self._answer.answer()
        if answer is None:
            return {}
        try:
            return capture.response_attributes(answer, self._stream.headers)
        except MALFORMED as error:  # nested deeper than can be written, for instance
            self._answer.spoil(f"the answer cannot be recorded: {error!r}")
            return {}
