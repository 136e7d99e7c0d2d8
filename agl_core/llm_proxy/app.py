"""The proxy's HTTP side: it serves agents, records each call as a span, forwards to the backend.

    POST /rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions
    GET  /health

A call belongs to the attempt in its path, which must be open in the tracer. Streams pass through as
they come (`relay`). Errors of the backend pass through with status and body; the proxy's own have
OpenAI's shape, `{"error": {"message", "type", "code"}}`. An agent's API key is neither forwarded
nor logged.
"""

import hmac
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from opentelemetry.trace import Span
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core import semconv
from agl_core.errors import TraceError, UpstreamError
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.refusal import (
    Refusal,
    error_response,
    fail,
    json_response,
    while_connected,
)
from agl_core.llm_proxy.relay import StreamedResponse
from agl_core.llm_proxy.upstream import Upstream, UpstreamReply, UpstreamStream, UpstreamTimeout
from agl_core.tracer.base import ModelCall, Tracer
from agl_core.types.training import PolicyRef

CHAT_PATH = "/rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions"
_PASSED_HEADERS = ("retry-after", "x-request-id")


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """How the proxy serves; holds values only."""

    backend_url: str
    """Base URL of the one model server, ending in `/v1`."""
    rollout_seeds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Seed of each rollout, for its calls that bring none; else a rollout is seeded by its id."""
    backend_api_key: str | None = None
    policy: PolicyRef | None = None
    """What must answer; a call that other weights served is refused. None lets any answer."""
    token: str | None = None
    """What agents must send as their API key; None where only this machine can connect."""
    deadline_seconds: float = 600.0
    """For one call, retries included."""
    max_tries: int = 8
    max_request_bytes: int = 16 * 1024 * 1024


class ChatProxy:
    """Serves model calls: checks, records, forwards."""

    def __init__(self, config: ProxyConfig, tracer: Tracer, upstream: Upstream) -> None:
        self._config = config
        self._tracer = tracer
        self._upstream = upstream

    async def chat_completions(self, request: Request) -> Response:
        """Serve one chat completion."""
        rollout_id = request.path_params["rollout_id"]
        try:
            self._check_token(request)
            call = self._tracer.start_call(rollout_id, request.path_params["attempt_id"])
        except Refusal as refusal:
            return error_response(refusal)
        except TraceError as error:
            return error_response(Refusal(404, str(error), "attempt_not_running"))
        response: Response | None = None
        try:
            response = await self._serve(request, call, rollout_id)
            return response
        except Refusal as refusal:
            fail(call.span, refusal.message)
            call.span.set_attribute(semconv.HTTP_STATUS, refusal.status)
            return error_response(refusal)
        except BaseException as error:
            fail(call.span, f"the call was interrupted: {type(error).__name__}")
            raise
        finally:
            if not isinstance(response, StreamedResponse):  # it ends its span when it has ended
                call.span.end()

    async def _serve(self, request: Request, call: ModelCall, rollout_id: str) -> Response:
        """Forward one call and record it in its span."""
        body = await self._read_body(request)
        rollout_seed = self._config.rollout_seeds.get(rollout_id, rollout_id)
        seed = capture.call_seed(rollout_seed, call.index)
        asked = capture.add_recording(body, seed)
        call.span.set_attributes(capture.request_attributes(asked))
        if reason := capture.find_unsupported(body):
            raise Refusal(400, reason, "unsupported")
        reply = await while_connected(request.receive, self._forward(asked))
        try:
            self._check_reply(reply, asked, call.span)
            if isinstance(reply, UpstreamStream):
                return StreamedResponse(reply, body, call, _passed_headers(reply))
        except BaseException:
            if isinstance(reply, UpstreamStream):
                await reply.close()
            raise
        if reply.status != 200:
            fail(call.span, f"the model server answered HTTP {reply.status}")
            return _passed_through(reply)
        if body.get("stream"):
            raise Refusal(502, "the model server's answer is not an event stream", "bad_answer")
        answer = _parse_answer(reply)
        recorded = capture.response_attributes(answer, reply.headers)
        call.span.set_attributes(recorded)
        if defect := capture.find_defect(recorded):
            fail(call.span, defect)
        return json_response(capture.visible_answer(answer, body))

    def _check_reply(
        self, reply: UpstreamReply | UpstreamStream, asked: capture.JsonObject, span: Span
    ) -> None:
        """Refuse the answer of other weights than the rollout's."""
        span.set_attribute(semconv.HTTP_STATUS, reply.status)
        policy = self._config.policy
        if policy and (reason := capture.find_other_policy(policy, asked, reply)):
            # 503: neither the agent's mistake nor for ever.
            raise Refusal(503, reason, "other_policy")

    def _check_token(self, request: Request) -> None:
        """Refuse a call without the token, where one is set."""
        if self._config.token is None:
            return
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), self._config.token.encode()):
            raise Refusal(401, "this proxy wants its token as the API key", "invalid_token")

    async def _read_body(self, request: Request) -> capture.JsonObject:
        """Read the request's JSON object, within the size limit."""
        limit = self._config.max_request_bytes
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > limit:
                raise Refusal(413, f"the request is larger than {limit} bytes", "too_large")
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise Refusal(400, f"the request is not JSON: {error}", "invalid_json") from error
        if not isinstance(body, dict):
            raise Refusal(400, "the request is not a JSON object", "invalid_json")
        return body

    async def _forward(self, asked: capture.JsonObject) -> UpstreamReply | UpstreamStream:
        """Send the request on; no answer becomes 504 or 502."""
        try:
            content = orjson.dumps(asked)
            if asked.get("stream"):
                return await self._upstream.post_streamed("/chat/completions", content)
            return await self._upstream.post("/chat/completions", content)
        except UpstreamTimeout as error:
            raise Refusal(504, str(error), "upstream_timeout") from error
        except UpstreamError as error:
            raise Refusal(502, str(error), "upstream_unreachable") from error


def create_app(config: ProxyConfig, tracer: Tracer) -> Starlette:
    """Return the proxy as an ASGI application."""
    handler: ChatProxy | None = None

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        nonlocal handler
        del app
        async with Upstream(
            config.backend_url,
            api_key=config.backend_api_key,
            deadline_seconds=config.deadline_seconds,
            max_tries=config.max_tries,
        ) as upstream:
            handler = ChatProxy(config, tracer, upstream)
            yield

    async def chat_completions(request: Request) -> Response:
        assert handler is not None, "the application was not started (lifespan)"
        return await handler.chat_completions(request)

    return Starlette(
        routes=[
            Route(CHAT_PATH, chat_completions, methods=["POST"]),
            Route("/health", _health, methods=["GET"]),
        ],
        exception_handlers={404: _unknown_path, 405: _unknown_path},
        lifespan=lifespan,
    )


async def _health(request: Request) -> Response:
    del request
    return json_response({"status": "ok"})


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = (
        f"{request.method} {request.url.path} is not served here; the base URL of a client is "
        "/rollout/{rollout_id}/attempt/{attempt_id}/v1 and the call POST /chat/completions"
    )
    return error_response(Refusal(status, message, "unknown_path"))


def _parse_answer(reply: UpstreamReply) -> capture.JsonObject:
    """Return the backend's answer as a chat completion; refuse anything else."""
    try:
        answer: Any = orjson.loads(reply.content)
    except orjson.JSONDecodeError as error:
        raise Refusal(
            502, f"the model server's answer is not JSON: {error}", "bad_answer"
        ) from error
    if reason := capture.check_answer(answer):
        raise Refusal(502, f"the model server: {reason}", "bad_answer")
    return answer


def _passed_through(reply: UpstreamReply) -> Response:
    media_type = reply.headers.get("content-type", "application/json")
    return Response(reply.content, reply.status, _passed_headers(reply), media_type)


def _passed_headers(reply: UpstreamReply | UpstreamStream) -> dict[str, str]:
    return {name: reply.headers[name] for name in _PASSED_HEADERS if name in reply.headers}
