"""What every request of an agent needs: it may come in, it is read, it is sent on."""

import asyncio
import hmac
from collections.abc import Mapping

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from agl_core.errors import UpstreamError
from agl_core.llm_proxy.backends import UnknownModel
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.refusal import Refusal, while_connected
from agl_core.llm_proxy.upstream import (
    UnwritableRequest,
    Upstream,
    UpstreamReply,
    UpstreamStream,
    UpstreamTimeout,
)


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


async def read_body(request: Request, config: ProxyConfig) -> JsonObject:
    """Return the request's JSON object.

    Raises:
        Refusal: It is none, or beyond the limits of size and time.
    """
    limit, seconds = config.max_request_bytes, config.request_seconds
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    message = f"the request is larger than {limit} bytes"
                    raise Refusal(413, message, "too_large")
    except TimeoutError as error:
        message = f"the request did not arrive within {seconds:g} s"
        raise Refusal(408, message, "too_slow") from error
    except ClientDisconnect as error:
        message = "the agent closed the connection before it had sent its request"
        raise Refusal(499, message, "client_closed") from error
    return parse_body(bytes(content))


def parse_body(content: bytes) -> JsonObject:
    """Return a JSON object.

    Raises:
        Refusal: It is none.
    """
    try:
        body = orjson.loads(content)
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
