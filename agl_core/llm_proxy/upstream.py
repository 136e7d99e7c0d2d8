"""The proxy's side towards the model server: one POST, with retries inside one deadline.

A retry repeats a request with the same seed, so it is safe wherever no answer arrived. Statuses
that another try may change are retried; when time or tries run out, the last answer is handed on as
it is. A plain 500 is not retried: the server says that it failed on this request.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import httpx
import tenacity

from agl_core.errors import UpstreamError
from agl_core.utils.connections import Connections, OpenResponse

T = TypeVar("T")

logger = logging.getLogger(__name__)

RETRIABLE_STATUS = frozenset({408, 409, 429, 502, 503, 504})
_TIMEOUT = httpx.Timeout(None, connect=10.0).as_dict()
"""The deadline bounds the whole; a connection that does not come about is given up and retried."""
_BACKOFF = tenacity.wait_exponential(multiplier=0.2, max=10.0) + tenacity.wait_random(0.0, 0.2)


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """What the model server answered, whatever its status."""

    status: int
    headers: httpx.Headers
    content: bytes


class UpstreamStream:
    """An event stream that the model server answers with (status 200), from its first bytes on.

    Whoever gets it closes it. Iteration gives its bytes as they arrive.

    Args:
        opened: The answer.
        chunks: Its bytes after the first ones.
        first: Its first bytes.
        deadline: When the whole must have ended, in the event loop's time.
    """

    status = 200

    def __init__(
        self, opened: OpenResponse, chunks: AsyncGenerator[bytes], first: bytes, deadline: float
    ) -> None:
        self.headers = opened.response.headers
        self.deadline = deadline
        self._opened = opened
        self._chunks = chunks
        self._first = first

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        """Give the bytes.

        Raises:
            UpstreamError: The connection broke.
        """
        yield self._first
        try:
            async for chunk in self._chunks:
                yield chunk
        except httpx.TransportError as error:
            raise UpstreamError(
                f"the model server's stream broke off: {type(error).__name__}: {error}"
            ) from error

    async def close(self) -> None:
        """Stop reading; the model server sees its connection close if it still writes."""
        await self._chunks.aclose()
        await self._opened.close()


class UpstreamTimeout(UpstreamError):  # noqa: N818 - named like TimeoutError's relatives in httpx
    """The model server did not answer before the deadline."""


class Upstream:
    """One model server behind its base URL (ending in `/v1`); used in one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        deadline_seconds: float = 600.0,
        max_tries: int = 8,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.deadline_seconds = deadline_seconds
        self.max_tries = max_tries
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._connections = Connections(base_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def post(self, path: str, content: bytes) -> UpstreamReply:
        """Send a JSON request and return the answer, also one with an error status.

        Args:
            path: Below the base URL, with its leading slash.
            content: The request body.

        Raises:
            UpstreamTimeout: No answer before the deadline.
            UpstreamError: No connection, or it broke, in every try.
        """
        return await self._with_retries(self._post_once, path, content)

    async def post_streamed(self, path: str, content: bytes) -> UpstreamStream | UpstreamReply:
        """Send a JSON request that asks for a stream, and return it once it has begun.

        An answer that is no event stream is read to its end. The deadline is for all of a stream;
        whoever reads it keeps to it.

        Args:
            path: Below the base URL, with its leading slash.
            content: The request body.

        Raises:
            UpstreamTimeout: Nothing came before the deadline.
            UpstreamError: No connection, or it broke, in every try.
        """
        return await self._with_retries(self._open_once, path, content)

    async def _with_retries(
        self, once: Callable[[str, bytes, float], Awaitable[T]], path: str, content: bytes
    ) -> T:
        """Call a function with URL, content and deadline until its answer is to be handed on."""
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(httpx.TransportError)
            | tenacity.retry_if_result(lambda reply: reply.status in RETRIABLE_STATUS),
            wait=_wait_seconds,
            stop=tenacity.stop_after_attempt(self.max_tries)
            | tenacity.stop_before_delay(self.deadline_seconds),
            before_sleep=_log_retry,
            retry_error_callback=_last_outcome,
        )
        deadline = asyncio.get_running_loop().time() + self.deadline_seconds
        try:
            async with asyncio.timeout_at(deadline):
                return await tries(once, f"{self.base_url}{path}", content, deadline)
        except TimeoutError as error:
            raise UpstreamTimeout(
                f"the model server did not answer within {self.deadline_seconds:g} s"
            ) from error
        except httpx.TransportError as error:
            raise UpstreamError(
                f"cannot reach the model server: {type(error).__name__}: {error}"
            ) from error

    async def _post_once(self, url: str, content: bytes, deadline: float) -> UpstreamReply:
        del deadline
        response = await self._connections.send(self._request(url, content))
        return UpstreamReply(response.status_code, response.headers, response.content)

    async def _open_once(
        self, url: str, content: bytes, deadline: float
    ) -> UpstreamStream | UpstreamReply:
        opened = await self._connections.open(self._request(url, content))
        response, is_handed_on = opened.response, False
        try:
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            if response.status_code != 200 or not is_stream:
                content = await response.aread()
                return UpstreamReply(response.status_code, response.headers, content)
            chunks = cast("AsyncGenerator[bytes]", response.aiter_bytes())
            first = await anext(chunks, b"")
            is_handed_on = True
            return UpstreamStream(opened, chunks, first, deadline)
        finally:
            if not is_handed_on:
                await opened.close()

    def _request(self, url: str, content: bytes) -> httpx.Request:
        return httpx.Request(
            "POST", url, headers=self._headers, content=content, extensions={"timeout": _TIMEOUT}
        )


def _last_outcome(state: tenacity.RetryCallState) -> Any:
    """Return the last reply, or raise the last error."""
    assert state.outcome is not None
    return state.outcome.result()


def _wait_seconds(state: tenacity.RetryCallState) -> float:
    """Return the server's Retry-After in seconds where it gives one, else the backoff."""
    if state.outcome is not None and not state.outcome.failed:
        try:
            return max(0.0, float(state.outcome.result().headers.get("retry-after", "")))
        except ValueError:
            pass  # absent, or an HTTP date
    return _BACKOFF(state)


def _log_retry(state: tenacity.RetryCallState) -> None:
    assert state.outcome is not None
    failed = state.outcome.failed
    logger.warning(
        "model server: %s; try %d follows in %.2f s",
        state.outcome.exception() if failed else f"HTTP {state.outcome.result().status}",
        state.attempt_number + 1,
        state.upcoming_sleep,
    )
