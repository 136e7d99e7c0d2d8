"""The embedded engine over HTTP: OpenAI's chat completions, and the policy that is served.

    POST /v1/chat/completions   `agl_core.serving.chat` says which fields
    GET  /v1/models             the served version, as OpenAI lists models
    GET  /policy                {"version", "weights_digest", "tokenizer_digest",
                                "chat_template_digest"}
    POST /policy                {"version", "path"}: load a local folder, then the same answer
    GET  /metrics               counts since the start, as JSON
    GET  /health                {"status": "ok"}; needs no token

Generation runs in the engine's thread, so the event loop stays free. With a token every route but
`/health` wants `Authorization: Bearer TOKEN`.
"""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.errors import AglError, ConfigError, TransientError, UpstreamError
from agl_core.serving.chat import chat_answer, describe, error_answer, parse_request
from agl_core.serving.engine import Engine, not_served
from agl_core.serving.generation import Completion, GenerationRequest, ServedPolicy

logger = logging.getLogger(__name__)


class LoadRequest(BaseModel):
    """Body of `POST /policy`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: str
    path: str
    """Folder on the server's machine."""


class EngineRoutes:
    """The handlers, and the counts that `/metrics` shows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._counts: Counter[str] = Counter()
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """Return every route."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/policy", self.policy, methods=["GET"]),
            Route("/policy", self.load, methods=["POST"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
        ]

    async def chat(self, http_request: Request) -> Response:
        """Sample the choices of one request."""
        request = parse_request(await http_request.body())
        policy = self._engine.loaded
        served = policy.served
        if request.model != served.version:
            raise not_served(request.model, served.version)
        prompt_ids = policy.encode(request.template_messages())
        limit = request.limit() or max(1, served.max_positions - len(prompt_ids))
        seed = secrets.randbits(32) if request.seed is None else request.seed
        futures = [
            self._engine.submit(
                GenerationRequest(
                    version=request.model,
                    prompt_ids=prompt_ids,
                    max_tokens=limit,
                    temperature=request.temperature,
                    seed=seed,
                    draw=draw,
                    stop=tuple(request.stop),
                )
            )
            for draw in range(request.n)
        ]
        completions = await asyncio.gather(*map(asyncio.wrap_future, futures))
        self._count(prompt_ids, completions)
        answer = chat_answer(request, prompt_ids, completions, policy.token_text)
        return _json(answer, headers=_policy_headers(completions[0].policy))

    async def models(self, _: Request) -> Response:
        """List the one model."""
        policy = self._engine.policy
        model = {
            "id": policy.version,
            "object": "model",
            "created": self._started,
            "owned_by": "agl",
            "max_model_len": policy.max_positions,
        }
        return _json({"object": "list", "data": [model]})

    async def policy(self, _: Request) -> Response:
        """Say which policy is served."""
        return _policy_answer(self._engine.policy)

    async def load(self, http_request: Request) -> Response:
        """Serve another policy."""
        try:
            request = LoadRequest.model_validate_json(await http_request.body())
        except ValidationError as error:
            raise ConfigError(describe(error)) from error
        loaded = await asyncio.to_thread(self._engine.load, request.version, Path(request.path))
        logger.info("serving version=%s digest=%s", loaded.version, loaded.weights_digest)
        return _policy_answer(loaded)

    async def metrics(self, _: Request) -> Response:
        """Return the counts."""
        names = ("requests_total", "prompt_tokens_total", "completion_tokens_total")
        counts = {name: self._counts[name] for name in names}
        return _json({**counts, "batches_total": self._engine.num_batches})

    async def health(self, _: Request) -> Response:
        """Answer that the server is up."""
        return _json({"status": "ok"})

    def _count(self, prompt_ids: list[int], completions: list[Completion]) -> None:
        self._counts["requests_total"] += 1
        self._counts["prompt_tokens_total"] += len(prompt_ids)
        self._counts["completion_tokens_total"] += sum(len(c.token_ids) for c in completions)


class BearerToken:
    """ASGI middleware that answers 401 without the token; `/health` is open."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                body = error_answer(
                    "a bearer token is required", "authentication_error", "invalid_api_key"
                )
                await _json(body, status=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(engine: Engine, token: str | None = None) -> ASGIApp:
    """Return the ASGI app over an engine, which stays the caller's to close.

    Args:
        engine: What samples.
        token: Bearer token that every route but `/health` wants; None for none.
    """
    app = Starlette(
        routes=EngineRoutes(engine).routes(),
        exception_handlers={AglError: _refuse, HTTPException: _refuse, Exception: _refuse},
    )
    return app if token is None else BearerToken(app, token)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps(body, separators=(",", ":"))
    return Response(content, status, headers, media_type="application/json")


def _policy_headers(policy: ServedPolicy) -> dict[str, str]:
    return {
        "x-agl-policy-version": policy.version,
        "x-agl-weights-digest": policy.weights_digest,
    }


def _policy_answer(policy: ServedPolicy) -> Response:
    body = {
        "version": policy.version,
        "weights_digest": policy.weights_digest,
        "tokenizer_digest": policy.tokenizer_digest,
        "chat_template_digest": policy.chat_template_digest,
    }
    return _json(body, headers=_policy_headers(policy))


async def _refuse(_: Request, error: Exception) -> Response:
    """Turn an error into OpenAI's shape; an unexpected one becomes a 500 without its text."""
    match error:
        case UpstreamError():
            status, kind, code = 404, "invalid_request_error", "model_not_found"
        case ConfigError():
            status, kind, code = 400, "invalid_request_error", "invalid_request"
        case TransientError():
            status, kind, code = 503, "server_error", "unavailable"
        case HTTPException():
            body = error_answer(error.detail, "invalid_request_error", "not_found")
            return _json(body, status=error.status_code, headers=dict(error.headers or {}))
        case _:
            return _json(error_answer("internal error", "server_error", "internal"), status=500)
    return _json(error_answer(str(error), kind, code), status=status)
