"""A deterministic model server with the engine's HTTP surface, which fails as it is told.

A reply depends on the messages and the seed alone (the proxy derives the seed from rollout and call
index), its log-probs are those that the served weights give it: so the content digest of a run does
not depend on what happened to it. Prompts are encoded by the policy's own tokenizer and template.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agl_core.errors import ConfigError
from agl_core.serving.chat import ChatAnswer, ChatRequest
from agl_core.serving.decoding import (
    LoadedPolicy,
    encode_chat,
    load_policy,
    load_tokenizer,
    score,
)
from agl_core.serving.generation import Completion, SampledToken, ServedPolicy
from agl_core.serving.requests import parse_body
from agl_core.serving.weights import chat_template_digest, tokenizer_digest, weights_digest
from agl_core.utils.threaded_server import ThreadedServer

MODEL_FAULTS = ("429", "500", "garbage", "half", "nothing")
HANG_SECONDS = 120.0
ALWAYS = 1 << 30


def chance(*parts: Any) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class DeterministicEngine:
    """Serves a policy's tokenizer with scripted replies."""

    def __init__(self, folder: Path, version: str = "v000000", port: int = 0) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._tokenizers = (tokenizer_digest(folder), chat_template_digest(folder))
        self.policy = self._served(version, folder)
        self.calls: Counter[str] = Counter()
        """Chat calls by what they were answered with."""
        self.seeds: Counter[int] = Counter()
        """Chat calls by their seed: a rollout that runs again repeats its seeds."""
        self.fault: Callable[[int, int], str | None] = lambda seed, arrival: None
        """Of a call's seed and how often it came: one of `MODEL_FAULTS`, or None."""
        self.delay_seconds = 0.0
        self._lock = threading.Lock()
        self._loaded: LoadedPolicy | None = None
        self._logprobs: dict[tuple[Any, ...], list[float]] = {}
        """Of what was said before: nearly all runs say the same."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/policy", self._policy, methods=["GET"]),
            Route("/policy", self._load, methods=["POST"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/health", self._metrics, methods=["GET"]),
        ]
        self._server = ThreadedServer(Starlette(routes=routes), port=port)

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop()

    def _served(self, version: str, folder: Path) -> ServedPolicy:
        return ServedPolicy(
            version=version,
            weights_digest=weights_digest(folder),
            tokenizer_digest=self._tokenizers[0],
            chat_template_digest=self._tokenizers[1],
            folder=folder,
            max_positions=256,
            num_tokens=len(self._tokenizer),
        )

    async def _chat(self, http_request: Request) -> Response:
        try:
            request = parse_body(ChatRequest, await http_request.body())
        except ConfigError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        policy = self.policy
        if request.model != policy.version:
            return JSONResponse({"error": {"message": "not served"}}, 404)
        seed = request.seed or 0
        with self._lock:
            self.seeds[seed] += 1
            fault = self.fault(seed, self.seeds[seed])
            self.calls[fault or "answered"] += 1
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        messages = request.template_messages()
        prompt_ids = encode_chat(self._tokenizer, messages)
        completion = self._completion(messages, prompt_ids, request.temperature, seed, policy)
        answer = ChatAnswer(request, prompt_ids, str).whole([completion])
        content = orjson.dumps(answer)
        if fault is not None:
            return await _broken(fault, content)
        headers = {
            "x-agl-policy-version": policy.version,
            "x-agl-weights-digest": policy.weights_digest,
        }
        return Response(content, headers=headers, media_type="application/json")

    def _completion(
        self,
        messages: list[dict[str, str]],
        prompt_ids: list[int],
        temperature: float,
        seed: int,
        policy: ServedPolicy,
    ) -> Completion:
        text = scripted_reply(messages, seed)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, self._tokenizer.eos_token_id]
        logprobs = self._score(policy, prompt_ids, ids, temperature)
        tokens = [
            SampledToken(token_id, logprob, [], "", policy)
            for token_id, logprob in zip(ids, logprobs, strict=True)
        ]
        tokens[-1] = replace(tokens[-1], finish_reason="stop")
        return Completion(tokens, text)

    def _score(
        self, policy: ServedPolicy, prompt_ids: list[int], ids: list[int], temperature: float
    ) -> list[float]:
        """Return the log-probs that the weights give a reply."""
        key = (policy.weights_digest, tuple(prompt_ids), tuple(ids), temperature)
        if key not in self._logprobs:
            loaded = self._loaded
            if loaded is None or loaded.served.weights_digest != policy.weights_digest:
                loaded = self._loaded = load_policy(policy.version, policy.folder)
            self._logprobs[key] = score(loaded, prompt_ids, ids, temperature)
        return self._logprobs[key]

    async def _policy(self, _: Request) -> Response:
        policy = self.policy
        return JSONResponse(
            {
                "version": policy.version,
                "weights_digest": policy.weights_digest,
                "tokenizer_digest": policy.tokenizer_digest,
                "chat_template_digest": policy.chat_template_digest,
            }
        )

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        self.policy = await asyncio.to_thread(self._served, body["version"], Path(body["path"]))
        return await self._policy(request)

    async def _metrics(self, _: Request) -> Response:
        return JSONResponse({"requests_total": self.calls.total()})


def scripted_reply(messages: list[dict[str, str]], seed: int) -> str:
    """Return what the calculator's policy might say: use the tool, guess, or be right at once."""
    last = messages[-1]["content"]
    if len(messages) > 1:
        return f"={last}"
    expression = last.removeprefix("What is ").removesuffix("?")
    way = seed % 5
    if way < 2:
        return f"calc({expression})"
    return f"~{seed % 97}"


async def _broken(fault: str, content: bytes) -> Response:
    """Answer as a server does that is ill."""
    if fault == "nothing":
        await asyncio.sleep(HANG_SECONDS)
        return Response(b"", 503)
    if fault == "garbage":
        return Response(b"<html>\x00\xff not JSON", media_type="application/json")
    if fault == "half":
        return StreamingResponse(
            _first_half(content), headers={"content-length": str(len(content))}
        )
    error = {"error": {"message": f"scripted {fault}", "type": "scripted", "code": fault}}
    headers = {"retry-after": "0.1"} if fault == "429" else None
    return JSONResponse(error, int(fault), headers)


async def _first_half(content: bytes) -> AsyncGenerator[bytes]:
    yield content[: len(content) // 2]
    raise ConnectionError("scripted end of the connection")


def seeded_fault(
    kinds: tuple[str, ...], seed: int, share: float, times: int
) -> Callable[[int, int], str | None]:
    """Return faults for a seeded share of the calls, each the first `times` that it comes."""

    def fault(call_seed: int, arrival: int) -> str | None:
        is_chosen = arrival <= times and chance(seed, call_seed) < share
        return kinds[int(chance(seed, call_seed, "kind") * len(kinds))] if is_chosen else None

    return fault
