"""Answers of the proxy itself, and what ends a call without an answer."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from opentelemetry.trace import Span, Status, StatusCode
from starlette.responses import Response
from starlette.types import Receive

T = TypeVar("T")


class Refusal(Exception):  # noqa: N818 - an answer, raised to leave the handler
    """The proxy answers a call itself, with an error."""

    def __init__(self, status: int = 500, message: str = "", code: str = "") -> None:
        message = _writable(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": error_type, "code": self.code}}


def fail(span: Span, reason: str) -> None:
    """Mark a span as failed."""
    span.set_status(Status(StatusCode.ERROR, _writable(reason)))


def _writable(text: str) -> str:
    """Return a text that JSON can hold: what a model server sends may be no Unicode."""
    return text.encode(errors="replace").decode()


def json_response(content: Any, status: int = 200) -> Response:
    """Return an answer of JSON."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def error_response(refusal: Refusal) -> Response:
    """Return a refusal as an answer."""
    return json_response(refusal.body(), refusal.status)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; where the agent goes away, stop it, so that the backend stops too.

    Raises:
        Refusal: The agent went away.
    """
    scope = asyncio.timeout(None)  # ends the work in this task: a task of its own costs more

    async def watch() -> None:
        await _wait_until_disconnected(receive)
        scope.reschedule(asyncio.get_running_loop().time())

    try:
        async with scope:
            leaving = asyncio.create_task(watch())
            try:
                return await work
            finally:
                leaving.cancel()
    except TimeoutError as error:
        if not scope.expired():
            raise
        message = "the agent closed the connection before the answer"
        raise Refusal(499, message, "client_closed") from error


async def _wait_until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
