"""The embedded engine over HTTP: OpenAI's completions, and the policy that is served.

    POST /v1/chat/completions   `agl_core.serving.chat` says which fields
    POST /v1/completions        `agl_core.serving.completions` says which
    POST /tokenize              {"model", "messages", "tools"} -> {"count", "max_model_len",
                                "tokens"}, as vLLM's
    GET  /v1/models             the served version, as OpenAI lists models
    GET  /policy                {"version", "weights_digest", "tokenizer_digest",
                                "chat_template_digest"}
    POST /policy                {"version", "path"}: load a local folder, then the same answer
    GET  /metrics               counts since the start, as JSON
    GET  /health                {"status": "ok"}; needs no token

Both answer in streams of server-sent events too, an event for each token as it is sampled. A client
that goes away frees its place in the engine. Generation runs in the engine's thread, so the event
loop stays free. With a token every route but `/health` wants `Authorization: Bearer TOKEN`.
"""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.errors import AglError, ConfigError, TransientError, UpstreamError
from agl_core.llm_proxy.refusal import Refusal, error_response, while_connected
from agl_core.serving.answers import DONE, Answer, error_answer, event
from agl_core.serving.chat import ChatAnswer, ChatRequest
from agl_core.serving.completions import CompletionAnswer, CompletionRequest
from agl_core.serving.conversation import TokenizeRequest
from agl_core.serving.decoding import LoadedPolicy
from agl_core.serving.engine import Engine, not_served
from agl_core.serving.generation import Completion, GenerationRequest, ServedPolicy
from agl_core.serving.generation_stream import GenerationStream
from agl_core.serving.requests import RequestT, SamplingFields, parse_body
from agl_core.utils.foreign_requests import find_foreign
from agl_core.utils.request_body import BodyRefused, check_json, off_loop, read_body

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_SHORT_CHARS = 100_000
"""Prompts up to this size are encoded in the event loop: a thread costs more."""


class LoadRequest(BaseModel):
    """Body of `POST /policy`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: str
    path: str
    """Folder on the server's machine."""
    weights_digest: str | None = None
    """What the folder must hold; None takes what it holds."""


class EngineRoutes:
    """The handlers, and the counts that `/metrics` shows."""

    def __init__(self, engine: Engine, *, allows_forced: bool) -> None:
        self._engine = engine
        self._allows_forced = allows_forced
        self._counts: Counter[str] = Counter()
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """Return every route."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/policy", self.policy, methods=["GET"]),
            Route("/policy", self.load, methods=["POST"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
        ]

    async def chat(self, http_request: Request) -> Response:
        """Sample the choices of one chat completion."""
        request = await _read(ChatRequest, http_request)
        policy = self._served_policy(request.model)
        prompt_ids = await _encoded(policy, request)
        limit = request.limit() or max(1, policy.served.max_positions - len(prompt_ids))
        generations = request.generations(
            prompt_ids,
            limit,
            _seed(request),
            request.top_logprobs or 0,
            self._forced(request.forced_ids()),
        )
        answer = ChatAnswer(request, prompt_ids, policy.token_text)
        return await self._answer(http_request, request, generations, answer)

    async def complete(self, http_request: Request) -> Response:
        """Sample the choices of one completion."""
        request = await _read(CompletionRequest, http_request)
        policy = self._served_policy(request.model)
        prompt = request.prompt
        prompt_ids = await _text_ids(policy, prompt) if isinstance(prompt, str) else prompt
        if not prompt_ids:
            raise ConfigError("prompt: it has no token")
        generations = request.generations(
            prompt_ids,
            request.max_tokens,
            _seed(request),
            request.logprobs or 0,
            self._forced(request.forced_token_ids),
        )
        answer = CompletionAnswer(request, prompt_ids, policy.token_text)
        return await self._answer(http_request, request, generations, answer)

    async def tokenize(self, http_request: Request) -> Response:
        """Return the ids of the prompt that a conversation makes."""
        request = await _read(TokenizeRequest, http_request)
        policy = self._served_policy(request.model)
        ids = await _encoded(policy, request)
        body = {"count": len(ids), "max_model_len": policy.served.max_positions, "tokens": ids}
        return _json(body, headers=_policy_headers(policy.served))

    def _served_policy(self, version: str) -> LoadedPolicy:
        """Return the policy that is served now; another one is refused."""
        policy = self._engine.loaded
        if version != policy.served.version:
            raise not_served(version, policy.served.version)
        return policy

    def _forced(self, ids: list[int] | None) -> list[int] | None:
        """Return ids to continue with, where the server was started for that."""
        if ids is not None and not self._allows_forced:
            raise ConfigError(
                "forced_token_ids: for tests only, of an engine with --allow-forced-tokens"
            )
        return ids

    async def _answer(
        self,
        http_request: Request,
        request: SamplingFields,
        generations: Sequence[GenerationRequest],
        answer: Answer,
    ) -> Response:
        """Sample, and answer whole or as a stream; work for a client that left is stopped."""
        if request.stream:
            stream = GenerationStream(self._engine, generations)
            try:
                first = await while_connected(http_request.receive, stream.first())
            except BaseException:
                stream.cancel()
                raise
            return _StreamedAnswer(self, stream, answer, first.policy)
        futures = self._engine.submit_together(generations, [None] * len(generations))
        gathered = asyncio.gather(*map(asyncio.wrap_future, futures))
        completions = await while_connected(http_request.receive, _result(gathered))
        whole = answer.whole(completions)
        self.count(answer)
        return _json(whole, headers=_policy_headers(completions[0].policy))

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
        request = await _read(LoadRequest, http_request)
        loaded = await asyncio.to_thread(
            self._engine.load, request.version, Path(request.path), request.weights_digest
        )
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

    def count(self, answer: Answer) -> None:
        """Count a call that was answered to its end."""
        self._counts["requests_total"] += 1
        self._counts["prompt_tokens_total"] += len(answer.prompt_ids)
        self._counts["completion_tokens_total"] += answer.num_sampled


class _StreamedAnswer(StreamingResponse):
    """An answer in server-sent events; whatever ends it, nothing is sampled for it after that."""

    def __init__(
        self, routes: EngineRoutes, stream: GenerationStream, answer: Answer, policy: ServedPolicy
    ) -> None:
        super().__init__(
            self._events(), headers=_policy_headers(policy), media_type="text/event-stream"
        )
        self._routes = routes
        self._stream = stream
        self._answer = answer
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the end, or until the client goes away."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()

    async def _events(self) -> AsyncGenerator[bytes]:
        """Give an event for each token; an error ends them as one of OpenAI's."""
        for chunk in self._answer.first_chunks(self._policy):
            yield event(chunk)
        try:
            async for index, token in self._stream:
                yield event(self._answer.chunk(index, token))
        except Exception as error:
            logger.exception("a stream broke off")
            yield event(_refusal(error)[1])
            return
        for chunk in self._answer.last_chunks(self._policy):
            yield event(chunk)
        self._routes.count(self._answer)
        yield DONE


async def _read(kind: type[RequestT], request: Request) -> RequestT:
    """Return the checked body of a request."""
    try:
        body = await read_body(request, _MAX_REQUEST_BYTES, "application/json", needs_type=False)
        return await off_loop(body, lambda body: parse_body(kind, check_json(body)))
    except BodyRefused as refused:
        raise Refusal(refused.status, str(refused), "invalid_request") from refused


async def _encoded(policy: LoadedPolicy, request: ChatRequest | TokenizeRequest) -> list[int]:
    """Return the ids of a conversation; a long one is encoded in a thread.

    Raises:
        ConfigError: It has more messages than the policy has positions; templates write at least
            one token for each.
    """
    if len(request.messages) > policy.served.max_positions:
        raise ConfigError(
            f"messages: {len(request.messages)} of them exceed the model's "
            f"{policy.served.max_positions} positions"
        )
    messages, tools = request.template_messages(), request.template_tools()
    if sum(len(str(message)) for message in messages) <= _SHORT_CHARS:
        return policy.encode(messages, tools)
    return await asyncio.to_thread(policy.encode, messages, tools)


async def _text_ids(policy: LoadedPolicy, text: str) -> list[int]:
    """Return the ids of a text; a long one is encoded in a thread."""
    if len(text) <= _SHORT_CHARS:
        return policy.encode_text(text)
    return await asyncio.to_thread(policy.encode_text, text)


async def _result(gathered: "asyncio.Future[list[Completion]]") -> list[Completion]:
    return await gathered


def _seed(request: SamplingFields) -> int:
    """Return the request's seed, or a random one."""
    return secrets.randbits(32) if request.seed is None else request.seed


class _Guard:
    """ASGI middleware that answers 401 without the token, or, if there is none, 403 to what a web
    page had a browser send; `/health` is open.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "http" and scope["path"] != "/health":
            answer = self._refuse(Headers(scope=scope))
            if answer is not None:
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, headers: Headers) -> Response | None:
        """Return the answer to a request that is not served."""
        if self._expected is None:
            reason = find_foreign(headers)
            return error_response(Refusal(403, reason, "foreign_request")) if reason else None
        if hmac.compare_digest(headers.get("authorization", "").encode(), self._expected):
            return None
        body = error_answer("a bearer token is required", "authentication_error", "invalid_api_key")
        return _json(body, status=401)


def create_app(engine: Engine, token: str | None = None, *, allows_forced: bool = False) -> ASGIApp:
    """Return the ASGI app over an engine, which stays the caller's to close.

    Args:
        engine: What samples.
        token: Bearer token that every route but `/health` wants; None for none.
        allows_forced: Whether requests may bring the ids to continue with; for tests.
    """
    routes = EngineRoutes(engine, allows_forced=allows_forced).routes()
    kinds = (AglError, HTTPException, Refusal, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _refuse))
    return _Guard(app, token)


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
    """Turn an error into an answer of OpenAI's shape."""
    if isinstance(error, Refusal):
        return error_response(error)
    status, body = _refusal(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else None
    return _json(body, status=status, headers=headers)


def _refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body; an unexpected error becomes a 500 without its text."""
    match error:
        case UpstreamError():
            return 404, error_answer(str(error), "invalid_request_error", "model_not_found")
        case ConfigError():
            return 400, error_answer(str(error), "invalid_request_error", "invalid_request")
        case TransientError():
            return 503, error_answer(str(error), "server_error", "unavailable")
        case HTTPException():
            body = error_answer(error.detail, "invalid_request_error", "not_found")
            return error.status_code, body
        case _:
            return 500, error_answer("internal error", "server_error", "internal")
