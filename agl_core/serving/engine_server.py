"""The embedded engine over HTTP: OpenAI's chat completions, and the policy that is served.

    POST /v1/chat/completions   `agl_core.serving.chat` says which fields
    GET  /v1/models             the served version, as OpenAI lists models
    GET  /policy                {"version", "weights_digest"}
    POST /policy                {"version", "path"}: load a local folder, then the same answer
    GET  /metrics               counts since the start, as JSON
    GET  /health                {"status": "ok"}; needs no token

Generation runs in the engine's thread, so the event loop stays free. With a token every route but
`/health` wants `Authorization: Bearer TOKEN`.
"""

import argparse
import asyncio
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.errors import AglError, ConfigError, TransientError, UpstreamError
from agl_core.serving.chat import chat_answer, describe, error_answer, parse_request
from agl_core.serving.engine import Engine, not_served, set_num_threads
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
        return _json(answer, headers=_policy_headers(served))

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
    body = {"version": policy.version, "weights_digest": policy.weights_digest}
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


class _AnnouncedServer(uvicorn.Server):
    """Writes its base URL to a file once it accepts requests."""

    def __init__(self, config: uvicorn.Config, url: str, address_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._address_file = address_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then announce."""
        await super().startup(sockets)
        logger.info("serving at %s", self._url)
        if self._address_file is not None:
            write_atomically(self._address_file, self._url)


def write_atomically(file: Path, text: str) -> None:
    """Write a small file that readers see whole or not at all."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def serve(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, address_file: Path | None = None
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: What answers.
        host: Name or address to bind.
        port: 0 for a free one.
        address_file: Gets the base URL (without `/v1`) once requests are accepted.

    Raises:
        OSError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listener:
        # Connections inherit it. asyncio sets it only where the socket names its protocol, which
        # this one does not; without it an answer in two writes takes 40 ms (delayed ACK).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", backlog=1024
        )
        _AnnouncedServer(config, url, address_file).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m agl_core.serving.engine", description="Serve a small model over HTTP."
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--version", required=True, help="name it is served under, v000000")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 for a free one")
    parser.add_argument("--address-file", type=Path, help="gets the base URL once it is up")
    parser.add_argument("--token-file", type=Path, help="holds the bearer token to ask for")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--max-batch-size", type=int, default=64)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the server; return the exit status, 2 where the settings cannot be used."""
    options = _options(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    try:
        token = options.token_file.read_text().strip() if options.token_file else None
        if not token and not is_loopback(options.host):
            raise ConfigError(f"--host {options.host} is open to other machines: give --token-file")
        if options.threads is not None:
            set_num_threads(options.threads)
        engine = Engine(options.model, options.version, max_batch_size=options.max_batch_size)
    except (ConfigError, OSError) as error:
        logger.error("%s", error)
        return 2
    try:
        serve(create_app(engine, token), options.host, options.port, options.address_file)
    finally:
        engine.close()
    return 0
