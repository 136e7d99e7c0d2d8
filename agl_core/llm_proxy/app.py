"""The proxy's HTTP side: it serves agents, records each call as a span, forwards to the backend.

    POST /rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions
    GET  /health

A call belongs to the attempt in its path, which must be open in the tracer. Errors of the backend
pass through with status and body; the proxy's own have OpenAI's shape,
`{"error": {"message", "type", "code"}}`. An agent's API key is neither forwarded nor logged.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from opentelemetry.trace import Span, Status, StatusCode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core import semconv
from agl_core.errors import TraceError, UpstreamError
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.upstream import Upstream, UpstreamReply, UpstreamTimeout
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


class Refusal(Exception):  # noqa: N818 - an answer, raised to leave the handler
    """The proxy answers a call itself, with an error."""

    def __init__(self, status: int = 500, message: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


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
            return _error_response(refusal)
        except TraceError as error:
            return _error_response(Refusal(404, str(error), "attempt_not_running"))
        try:
            return await self._serve(request, call, rollout_id)
        except Refusal as refusal:
            _fail(call.span, refusal.message)
            call.span.set_attribute(semconv.HTTP_STATUS, refusal.status)
            return _error_response(refusal)
        except BaseException as error:
            _fail(call.span, f"the call was interrupted: {type(error).__name__}")
            raise
        finally:
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
        reply = await _while_connected(request, self._forward(asked))
        call.span.set_attribute(semconv.HTTP_STATUS, reply.status)
        policy = self._config.policy
        if policy and (reason := capture.find_other_policy(policy, asked, reply)):
            # 503: neither the agent's mistake nor for ever.
            raise Refusal(503, reason, "other_policy")
        if reply.status != 200:
            _fail(call.span, f"the model server answered HTTP {reply.status}")
            return _passed_through(reply)
        answer = _parse_answer(reply)
        recorded = capture.response_attributes(answer, reply.headers)
        call.span.set_attributes(recorded)
        if defect := capture.find_defect(recorded):
            _fail(call.span, defect)
        return _json_response(capture.visible_answer(answer, body))

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

    async def _forward(self, asked: capture.JsonObject) -> UpstreamReply:
        """Send the request on; no answer becomes 504 or 502."""
        try:
            return await self._upstream.post("/chat/completions", orjson.dumps(asked))
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


async def _while_connected(
    request: Request, work: Coroutine[Any, Any, UpstreamReply]
) -> UpstreamReply:
    """Return the work's result; where the agent goes away, stop it, so that the backend stops too.

    Raises:
        Refusal: The agent went away.
    """
    # Two tasks and no TaskGroup: that would wrap what the work raises into a group.
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_until_disconnected(request))
    both = {working, leaving}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Refusal(499, "the agent closed the connection before the answer", "client_closed")
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


async def _wait_until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _health(request: Request) -> Response:
    del request
    return _json_response({"status": "ok"})


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = (
        f"{request.method} {request.url.path} is not served here; the base URL of a client is "
        "/rollout/{rollout_id}/attempt/{attempt_id}/v1 and the call POST /chat/completions"
    )
    return _error_response(Refusal(status, message, "unknown_path"))


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


def _fail(span: Span, reason: str) -> None:
    span.set_status(Status(StatusCode.ERROR, reason))


def _passed_through(reply: UpstreamReply) -> Response:
    headers = {name: reply.headers[name] for name in _PASSED_HEADERS if name in reply.headers}
    media_type = reply.headers.get("content-type", "application/json")
    return Response(reply.content, reply.status, headers, media_type)


def _json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _error_response(refusal: Refusal) -> Response:
    error_type = "server_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"message": refusal.message, "type": error_type, "code": refusal.code}
    return _json_response({"error": error}, refusal.status)
