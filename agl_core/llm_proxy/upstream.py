"""The proxy's side towards the model servers: one POST, with retries inside one deadline.

A retry repeats a request with the same seed, so it is safe wherever no answer arrived. Statuses
that another try may change are retried, at once where another server is up, else after the
Retry-After that the server gives or a growing pause; when time or tries run out, the last answer is
handed on as it is. A 500 gets two more tries only: most are the request's own fault.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson
import tenacity

from agl_core.errors import UpstreamError
from agl_core.llm_proxy.backends import Backends, LiveBackend
from agl_core.llm_proxy.capture import JsonObject

logger = logging.getLogger(__name__)

_RETRIABLE_BELOW_500 = frozenset({408, 409, 429})
_FINAL = frozenset({501, 505})
_MAX_TRIES_OF_500 = 3
_MAX_REPLY_BYTES = 256 * 1024 * 1024
"""Of one answer, decompressed, a stream in all; 1024 choices with log-probs have some 100 MB."""
_BROKEN = (aiohttp.ClientError, ConnectionResetError, BrokenPipeError)
_BACKOFF = tenacity.wait_exponential(multiplier=0.2, max=10.0) + tenacity.wait_random(0.0, 0.2)


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """What the model server answered, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """By names in any case."""
    content: bytes


class UpstreamStream:
    """An event stream that the model server answers with (status 200), from its first bytes on.

    Whoever gets it closes it. Iteration gives its bytes as they arrive.

    Args:
        response: The answer.
        chunks: Its bytes after the first ones.
        first: Its first bytes.
        deadline: When the whole must have ended, in the event loop's time.
        on_close: Called once it is closed.
    """

    status = 200

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        chunks: AsyncIterator[bytes],
        first: bytes,
        deadline: float,
        on_close: Callable[[], None],
    ) -> None:
        self.headers: Mapping[str, str] = response.headers
        self.deadline = deadline
        self._response = response
        self._chunks = chunks
        self._first = first
        self._on_close = on_close

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        """Give the bytes.

        Raises:
            UpstreamError: The connection broke, or the stream is larger than `_MAX_REPLY_BYTES`.
        """
        yield self._first
        num_bytes = len(self._first)
        try:
            async for chunk in self._chunks:
                num_bytes += len(chunk)
                if num_bytes > _MAX_REPLY_BYTES:
                    limit = _MAX_REPLY_BYTES
                    raise UpstreamError(f"the model server's stream is larger than {limit} bytes")
                yield chunk
        except _BROKEN as error:
            raise UpstreamError(f"the model server's stream broke off: {error}") from error

    async def close(self) -> None:
        """Stop reading; the model server sees its connection close if it still writes."""
        self._response.close()
        self._on_close()


class UpstreamTimeout(UpstreamError):  # noqa: N818 - named like TimeoutError's relatives in httpx
    """The model server did not answer before the deadline."""


class UnwritableRequest(UpstreamError):  # noqa: N818 - the agent's mistake, told as an answer
    """The request is nested deeper than can be written."""


class Upstream:
    """Sends calls to the model servers; used in one event loop.

    Args:
        backends: The servers; closed with this.
        deadline_seconds: For one call, retries included.
        max_tries: Of one call.
    """

    def __init__(
        self, backends: Backends, *, deadline_seconds: float = 600.0, max_tries: int = 8
    ) -> None:
        self.deadline_seconds = deadline_seconds
        self.max_tries = max_tries
        self._backends = backends

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._backends.close()

    async def send(self, path: str, asked: JsonObject) -> UpstreamReply | UpstreamStream:
        """Send a request and return the answer, also one with an error status.

        A stream, if one is asked for, is returned once it has begun. The deadline is for all of it;
        whoever reads it keeps to it and closes it. An answer that is no event stream is read to its
        end.

        Args:
            path: Below the base URL, with its leading slash.
            asked: The request.

        Raises:
            UpstreamTimeout: No answer, or nothing of a stream, before the deadline.
            UpstreamError: No connection, or it broke, in every try; or no server has the model.
        """
        deadline = asyncio.get_running_loop().time() + self.deadline_seconds
        call = _Call(self._backends, path, asked, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                reply = await self._send(call)
        except TimeoutError as error:
            raise UpstreamTimeout(
                f"the model server did not answer within {self.deadline_seconds:g} s"
            ) from error
        except _BROKEN as error:
            raise UpstreamError(f"cannot reach the model server: {error}") from error
        return reply

    async def _send(self, call: "_Call") -> UpstreamReply | UpstreamStream:
        """Try until an answer is to be handed on."""
        if await call.is_done_at_once():  # tenacity takes a quarter of a call's CPU time
            return await call.next_outcome()
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_BROKEN)
            | tenacity.retry_if_result(call.is_to_be_retried),
            wait=call.wait_seconds,
            stop=tenacity.stop_after_attempt(self.max_tries)
            | tenacity.stop_before_delay(self.deadline_seconds),
            before_sleep=_log_retry,
            retry_error_callback=_last_outcome,
        )
        return await tries(call.next_outcome)


class _Call:
    """One call and its tries."""

    def __init__(self, backends: Backends, path: str, asked: JsonObject, deadline: float) -> None:
        self._backends = backends
        self._path = path
        self._asked = asked
        self._deadline = deadline
        self._failed: set[LiveBackend] = set()
        """Servers whose answer is to be tried again; another one comes first."""
        self._num_500 = 0
        self._first: UpstreamReply | UpstreamStream | Exception | None = None

    async def is_done_at_once(self) -> bool:
        """Try for the first time and say whether there is nothing to repeat."""
        try:
            self._first = await self._send_once()
        except _BROKEN as error:
            self._first = error
            return False
        return not self.is_to_be_retried(self._first)

    async def next_outcome(self) -> UpstreamReply | UpstreamStream:
        """Return the outcome of the first try, or of another one."""
        first, self._first = self._first, None
        if isinstance(first, Exception):
            raise first
        return first or await self._send_once()

    async def _send_once(self) -> UpstreamReply | UpstreamStream:
        """Send the request to the server whose turn it is."""
        live = self._backends.choose(self._asked, self._failed)
        live.num_in_flight += 1
        is_open = False
        try:
            reply = await self._open(live)
            is_open = isinstance(reply, UpstreamStream)
        except _BROKEN:
            self._failed.add(live)
            live.mark(is_up=False)
            raise
        finally:
            if not is_open:  # a stream counts until it is closed
                live.release()
        live.mark(is_up=True)
        if reply.status != 200:
            self._failed.add(live)
            self._num_500 += reply.status == 500
        await self._backends.close_retired()
        return reply

    def is_to_be_retried(self, reply: UpstreamReply | UpstreamStream) -> bool:
        """Say whether another try may give a better answer."""
        if reply.status == 500:
            return self._num_500 < _MAX_TRIES_OF_500
        is_server_error = reply.status > 500 and reply.status not in _FINAL
        return is_server_error or reply.status in _RETRIABLE_BELOW_500

    def wait_seconds(self, state: tenacity.RetryCallState) -> float:
        """Return how long to wait: not at all where another server is up."""
        if self._backends.has_other(self._asked, self._failed):
            return 0.0
        self._failed.clear()
        if state.outcome is not None and not state.outcome.failed:
            try:
                seconds = float(state.outcome.result().headers.get("retry-after", ""))
            except ValueError:  # absent, or an HTTP date
                seconds = math.nan
            if seconds >= 0:
                return seconds
        return _BACKOFF(state)

    async def _open(self, live: LiveBackend) -> UpstreamReply | UpstreamStream:
        try:
            content = orjson.dumps(_in_dialect_of(live, self._asked))
        except orjson.JSONEncodeError as error:  # read, but too deep to be written
            raise UnwritableRequest(f"the request cannot be sent on: {error}") from error
        try:
            response = await live.post(self._path, content)
        except TimeoutError as error:  # of the connection: the deadline cancels
            raise aiohttp.ClientConnectionError("no connection came about in time") from error
        is_handed_on = False
        try:
            is_stream = response.content_type == "text/event-stream"
            if response.status != 200 or not is_stream or not self._asked.get("stream"):
                return UpstreamReply(response.status, response.headers, await _read(response))
            chunks = response.content.iter_any()
            first = await anext(chunks, b"")
            is_handed_on = True
            return UpstreamStream(response, chunks, first, self._deadline, live.release)
        finally:
            if not is_handed_on:
                response.release()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer that has an end.

    Raises:
        UpstreamError: It is larger than `_MAX_REPLY_BYTES`.
    """
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _MAX_REPLY_BYTES:
            response.close()
            raise UpstreamError(
                f"the model server's answer is larger than {_MAX_REPLY_BYTES} bytes"
            )
    return bytes(content)


def _in_dialect_of(live: LiveBackend, asked: JsonObject) -> JsonObject:
    """Return a request as a server takes it."""
    backend = live.backend
    if backend.upstream_model is not None:
        asked = {**asked, "model": backend.upstream_model}
    if not backend.returns_token_ids:
        asked = {name: value for name, value in asked.items() if name != "return_token_ids"}
    return asked


def _last_outcome(state: tenacity.RetryCallState) -> Any:
    """Return the last reply, or raise the last error."""
    assert state.outcome is not None
    return state.outcome.result()


def _log_retry(state: tenacity.RetryCallState) -> None:
    assert state.outcome is not None
    failed = state.outcome.failed
    logger.warning(
        "model server: %s; try %d follows in %.2f s",
        state.outcome.exception() if failed else f"HTTP {state.outcome.result().status}",
        state.attempt_number + 1,
        state.upcoming_sleep,
    )
