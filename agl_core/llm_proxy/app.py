"""The proxy's HTTP side: which path is served by what.

    POST .../chat/completions | completions | messages | responses     model calls (`attribution`)
    POST .../messages/count_tokens                                     how long a prompt would be
    GET  /health
    ...  /admin/...                                                    with its own token (`admin`)

Errors of the backend pass through with their status; the proxy's own have the shape of the agent's
dialect. An agent's API key is neither forwarded nor logged.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from agl_core.errors import TransientError
from agl_core.llm_proxy.accounts import Accounts
from agl_core.llm_proxy.admin import AdminRoutes
from agl_core.llm_proxy.attribution import find_kind
from agl_core.llm_proxy.backends import Backends
from agl_core.llm_proxy.chat import ChatDialect
from agl_core.llm_proxy.completions import CompletionsDialect
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.count_tokens import TokenCounter
from agl_core.llm_proxy.dialect import Dialect
from agl_core.llm_proxy.gate import Gate
from agl_core.llm_proxy.handler import CallHandler, CallSource
from agl_core.llm_proxy.messages import MessagesDialect
from agl_core.llm_proxy.refusal import Refusal, error_response, json_response
from agl_core.llm_proxy.responses import ResponsesDialect
from agl_core.llm_proxy.store_calls import StoreCalls
from agl_core.llm_proxy.upstream import Upstream
from agl_core.utils.foreign_requests import find_foreign

logger = logging.getLogger(__name__)

DIALECTS: dict[str, Dialect] = {
    "chat/completions": ChatDialect(),
    "completions": CompletionsDialect(),
    "messages": MessagesDialect(),
    "responses": ResponsesDialect(),
}
COUNT = "messages/count_tokens"


class ProxyApp:
    """The proxy as an ASGI application.

    Args:
        config: How it serves.
        calls: Where calls are recorded.
    """

    def __init__(
        self, config: ProxyConfig, calls: CallSource, *, closes_connections: bool = False
    ) -> None:
        self._closes_connections = closes_connections
        self.backends = Backends(config.all_backends())
        self.gate = Gate()
        self.accounts = Accounts(config.prices)
        self._config = config
        self._calls = calls
        upstream = Upstream(
            self.backends,
            deadline_seconds=config.deadline_seconds,
            max_tries=config.max_tries,
        )
        self._handler = CallHandler(config, calls, upstream, self.gate, self.accounts)
        self._count = TokenCounter(config, upstream, DIALECTS["messages"])
        self._upstream = upstream
        self._others = Starlette(
            routes=[Route("/health", _health, methods=["GET"]), *self._admin_routes()],
            exception_handlers={404: _unknown_path, 405: _unknown_path},
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if reason := self._find_foreign(scope):
            refusal = Refusal(403, reason, "foreign_request")
            await error_response(refusal)(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "POST":
            kind = find_kind(scope["path"]) or ""
            if self._closes_connections:
                send = _closing(send)
            if kind in DIALECTS:
                await self._handler.serve(DIALECTS[kind], scope, receive, send)
                return
            if kind == COUNT:
                await self._count(scope, receive, send)
                return
        await self._others(scope, receive, send)

    def _find_foreign(self, scope: Scope) -> str | None:
        """Return why a request is not served by a proxy without a token, or None."""
        if scope["type"] != "http" or scope["path"] == "/health" or self._config.token is not None:
            return None
        return find_foreign(Headers(scope=scope))

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        """Watch the model servers, and send what is recorded, while the proxy serves."""
        del app
        calls = self._calls if isinstance(self._calls, StoreCalls) else None
        async with self._upstream:
            tasks = [asyncio.create_task(self.backends.watch(self._config.health_seconds))]
            if calls is not None:
                tasks.append(asyncio.create_task(calls.run()))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        if calls is not None:
            try:
                await calls.finish()
            except TransientError as error:
                logger.error("recorded calls are lost: %s", error)

    def _admin_routes(self) -> list[Route]:
        token = self._config.admin_token
        if token is None:
            return []
        return AdminRoutes(token, self.gate, self.backends, self.accounts).routes()


def _closing(send: Send) -> Send:
    """Let each answer end its connection.

    Many agents make a client for each rollout and never close it; its sockets would stay open until
    the garbage collector finds the client. On one machine a connection costs next to nothing.
    """

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return send_closing


async def _health(request: Request) -> Response:
    del request
    return json_response({"status": "ok"})


async def _unknown_path(request: Request, error: Exception) -> Response:
    is_call = find_kind(request.url.path) in (*DIALECTS, COUNT)
    status = 405 if is_call else getattr(error, "status_code", 404)
    message = (
        f"{request.method} {request.url.path} is not served here; the base URL of a client is "
        "/rollout/{rollout_id}/attempt/{attempt_id}/v1 and the calls are POST "
        + ", ".join(f"/{kind}" for kind in DIALECTS)
    )
    return error_response(Refusal(status, message, "unknown_path"))
