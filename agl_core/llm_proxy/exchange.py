"""What every request of an agent needs: it may come in, it is read, it is sent on."""

import hmac
from collections.abc import Mapping

import orjson
from starlette.requests import Request
from starlette.types import Receive

from agl_core.errors import UpstreamError
from agl_core.llm_proxy.backends import UnknownModel
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.refusal import Refusal, while_connected
from agl_core.llm_proxy.upstream import (
    UnwritableRequest,
    Upstream,
    UpstreamReply,
    UpstreamStream,
    UpstreamTimeout,
)
from agl_core.utils import request_body
from agl_core.utils.request_body import REQUEST_SECONDS, BodyRefused, check_json, off_loop

MAX_REQUEST_BYTES = 16 * 1024 * 1024
_CODES = {408: "too_slow", 413: "too_large", 415: "wrong_type", 499: "client_closed"}


def check_token(headers: Mapping[str, str], token: str | None) -> None:
    """Return if a request has the token, as OpenAI's or as Anthropic's clients send it.

    Raises:
        Refusal: It does not, and one is set.
    """
    if token is None:
        return
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    for sent in (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
        if hmac.compare_digest(sent.encode(), token.encode()):
            return
    raise Refusal(401, "this proxy wants its token as the API key", "invalid_token")


async def read_body(
    request: Request, max_bytes: int = MAX_REQUEST_BYTES, seconds: float = REQUEST_SECONDS
) -> JsonObject:
    """Return the request's JSON object.

    Args:
        request: Not read yet.
        max_bytes: Of its body, before and after decompression.
        seconds: How long it may take to arrive.

    Raises:
        Refusal: It is none, or beyond the limits of size and time.
    """
    try:
        content = await request_body.read_body(
            request, max_bytes, "application/json", needs_type=False, seconds=seconds
        )
        return await off_loop(content, _parse)
    except BodyRefused as refused:
        code = _CODES.get(refused.status, "invalid_json")
        raise Refusal(refused.status, str(refused), code) from refused


def _parse(content: bytes) -> JsonObject:
    """Return a JSON object."""
    try:
        body = orjson.loads(check_json(content))
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the request is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise Refusal(400, "the request is not a JSON object", "invalid_json")
    return body


async def send_on(
    upstream: Upstream, path: str, asked: JsonObject, receive: Receive
) -> UpstreamReply | UpstreamStream:
    """Send a request to a model server and return its answer: status 200, or an error.

    Raises:
        Refusal: There is none, or the agent went away.
    """
    try:
        reply = await while_connected(receive, upstream.send(path, asked))
    except UnwritableRequest as error:
        raise Refusal(400, str(error), "invalid_json") from error
    except UnknownModel as error:
        raise Refusal(404, str(error), "model_not_found") from error
    except UpstreamTimeout as error:
        raise Refusal(504, str(error), "upstream_timeout") from error
    except UpstreamError as error:
        raise Refusal(502, str(error), "upstream_unreachable") from error
    if reply.status != 200 and not 400 <= reply.status <= 599:
        message = f"the model server answered HTTP {reply.status}, neither 200 nor an error"
        raise Refusal(502, message, "bad_answer")
    return reply


def safe_header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a model server's header; None where it is absent or cannot be sent on."""
    value = headers.get(name)
    is_sendable = value is not None and value.isascii() and value.isprintable()
    return value if is_sendable else None
