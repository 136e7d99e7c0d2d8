"""The store's HTTP application: each request of the table `wire.OPERATIONS` is a call of a store.

What may fail, and how that is answered, is in `agl_core.store.refusals`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast, get_origin
from urllib.parse import unquote

from pydantic import BaseModel, RootModel, SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agl_core.store import otlp_receiver, wire
from agl_core.store.base import LightningStore
from agl_core.store.guard import HEALTH_PATH, Guard
from agl_core.store.json_text import encode_records
from agl_core.store.older import with_later_methods
from agl_core.store.payloads import OneSpan
from agl_core.store.refusals import answer_to
from agl_core.store.repeated import Repeated
from agl_core.utils.request_body import check_json, off_loop, read_body

MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AppConfig:
    """How the store is served; holds values only."""

    token: SecretStr | None = None
    run_id: str | None = None
    cors_allow_origins: Sequence[str] = ()
    max_request_bytes: int = MAX_REQUEST_BYTES
    hold_seconds: float = wire.HOLD_SECONDS


class StoreApp:
    """Serves one store; its waits end when it stops."""

    def __init__(self, store: LightningStore, config: AppConfig) -> None:
        self._store = with_later_methods(store)
        self._config = config
        self._repeated = Repeated()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    def asgi(self) -> Starlette:
        """Return the application."""
        config = self._config
        routes = [Route(HEALTH_PATH, _health)]
        # Routes are matched in their order: fixed paths come before those with arguments.
        for operation in sorted(wire.OPERATIONS, key=lambda operation: "{" in operation.path):
            routes.append(self._route(operation))
        routes += otlp_receiver.routes(self._store, config.max_request_bytes)
        guard = Middleware(
            Guard,
            token=config.token,
            run_id=config.run_id,
            allow_origins=config.cors_allow_origins,
        )
        middleware = [guard]
        if config.cors_allow_origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_allow_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            )
            middleware.insert(0, cors)
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: _unknown_path},
            lifespan=self._lifespan,
        )

    def end_waits(self) -> None:
        """Answer the requests that wait, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        del app
        self._loop = asyncio.get_running_loop()
        yield
        self._loop = None

    def _route(self, operation: wire.Operation) -> Route:
        async def endpoint(request: Request) -> Response:
            sent = request.headers.get(wire.KEY_HEADER)
            key = None if sent is None else unquote(sent)
            if key is None or operation.repeats is not wire.Repeats.SERVER:
                return await self._answer(operation, request, key)
            return await self._repeated.once(
                f"{request.method} {request.url.path} {key}",
                lambda: self._answer(operation, request, None),
            )

        path = wire.PREFIX + operation.path
        for name in ("worker_id", "resources_id"):  # chosen by users, so with any character
            path = path.replace(f"{{{name}}}", f"{{{name}:path}}")
        return Route(path, endpoint, methods=[operation.method])

    async def _answer(
        self, operation: wire.Operation, request: Request, key: str | None
    ) -> Response:
        try:
            given = dict(request.path_params)
            if operation.arguments is not None:
                given |= await self._arguments(operation.arguments, request)
            if operation.repeats is wire.Repeats.STORE:
                given["idempotency_key"] = key
            if operation is wire.WAIT:
                return await _wait(self, operation, given, request)
            return await _SPECIAL.get(operation.path, _call)(self, operation, given)
        except Exception as error:  # noqa: BLE001 - each becomes an answer here
            return answer_to(error, operation.name)

    async def _arguments(self, model: type[BaseModel], request: Request) -> dict[str, Any]:
        """Return what a request says, in its query or its JSON body."""
        if request.method == "GET":
            given = model.model_validate(_query(model, request))
        else:
            body = await read_body(request, self._config.max_request_bytes, "application/json")
            given = await off_loop(
                body, lambda body: model.model_validate_json(check_json(body) or b"{}")
            )
        if isinstance(given, RootModel):
            name = "span" if isinstance(given, OneSpan) else "resources"
            return {name: cast(Any, given.root)}
        return {name: getattr(given, name) for name in given.model_fields_set}

    async def call(self, name: str, given: dict[str, Any]) -> Any:
        """Call a method of the store."""
        return await getattr(self._store, name)(**given)

    async def hold(self, waiting: Coroutine[Any, Any, Any], gone: Coroutine[Any, Any, Any]) -> None:
        """Wait for a call, until its client is gone, or until the server stops."""
        tasks = [asyncio.create_task(one) for one in (waiting, gone, self._stopping.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    @property
    def hold_seconds(self) -> float:
        """The longest that a request waits."""
        return self._config.hold_seconds


Handler = Callable[[StoreApp, wire.Operation, dict[str, Any]], Awaitable[Response]]


async def _call(app: StoreApp, operation: wire.Operation, given: dict[str, Any]) -> Response:
    return _json(await app.call(operation.name, given), operation.status)


async def _next_span(app: StoreApp, operation: wire.Operation, given: dict[str, Any]) -> Response:
    return _json({"sequence_id": await app.call(operation.name, given)}, operation.status)


async def _add_spans(app: StoreApp, operation: wire.Operation, given: dict[str, Any]) -> Response:
    """Say which of the spans were new, rather than send them back."""
    added = await app.call(operation.name, given)
    new = Counter((span.rollout_id, span.attempt_id, span.span_id) for span in added)
    answer: list[bool] = []
    for span in given["spans"]:
        identity = (span.rollout_id, span.attempt_id, span.span_id)
        answer.append(new[identity] > 0)
        new[identity] -= 1
    return _json(answer, operation.status)


async def _wait(
    app: StoreApp, operation: wire.Operation, given: dict[str, Any], request: Request
) -> Response:
    """Wait a while; say what has ended, and how many have not."""
    rollout_ids: list[str] = given["rollout_ids"]
    limit = given.get("timeout", 0.0)
    seconds = app.hold_seconds if limit is None else min(limit, app.hold_seconds)
    if seconds > 0:
        waiting = app.call(operation.name, {"rollout_ids": rollout_ids, "timeout": seconds})
        await app.hold(waiting, _gone(request))
    ended = await app.call(operation.name, {"rollout_ids": rollout_ids, "timeout": 0})
    others = list(set(rollout_ids) - {rollout.rollout_id for rollout in ended})
    pending = 0
    if others:
        pending = (await app.call("query_rollouts", {"rollout_id_in": others, "limit": 0})).total
    return _json(ended, operation.status, {wire.PENDING_HEADER: str(pending)})


_SPECIAL: dict[str, Handler] = {
    wire.NEXT_SPAN.path: _next_span,
    wire.ADD_SPANS.path: _add_spans,
}


async def _gone(request: Request) -> None:
    """Return when the client of a request, which is read to its end, has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _query(model: type[BaseModel], request: Request) -> dict[str, Any]:
    """Return the query of a URL; a field that is a list may be given several times."""
    query = request.query_params
    lists = {
        name
        for name, field in model.model_fields.items()
        if any(get_origin(part) is list for part in getattr(field.annotation, "__args__", ()))
    }
    return {name: query.getlist(name) if name in lists else query[name] for name in query}


def _json(value: Any, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_records(value), status, headers, "application/json")


async def _health(request: Request) -> Response:
    del request
    return JSONResponse({"status": "ok"})


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = cast(HTTPException, error).status_code
    detail = f"{request.method} {request.url.path} is not served here"
    return JSONResponse({"detail": detail}, status)
