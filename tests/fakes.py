"""Test doubles that behave like the real thing over real HTTP."""

import asyncio
import hashlib
import math
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agl_core.store.base import LightningStore
from agl_core.types.tracer import Span
from agl_core.utils.threaded_server import ThreadedServer
from tests.streams import to_events

Messages = list[dict[str, Any]]


def encode_chars(text: str) -> list[int]:
    """Return one token id in [0, 96) for each character."""
    return [ord(char) % 96 for char in text]


def decode_chars(token_ids: Sequence[int]) -> str:
    """Return the text of `encode_chars`, for printable ASCII."""
    return "".join(chr(i + 96 if i < 32 else i) for i in token_ids)


def scripted_reply(messages: Messages, seed: int) -> str:
    """Return eight letters that depend on the messages and the seed alone."""
    digest = hashlib.sha256(orjson.dumps([messages, seed])).digest()
    return "".join(chr(ord("a") + byte % 26) for byte in digest[:8])


class ScriptedModelServer:
    """A chat-completions server in vLLM's dialect whose replies are known in advance, streamed too.

    Its reply depends only on the messages and the seed; the proxy derives the seed from rollout id
    and call index. Attributes switch faults on, also while it runs.
    """

    def __init__(
        self,
        reply: Callable[[Messages, int], str] = scripted_reply,
        *,
        model: str = "scripted",
        encode: Callable[[str], list[int]] = encode_chars,
        decode: Callable[[Sequence[int]], str] = decode_chars,
        policy_version: str = "v000000",
        weights_digest: str = "0" * 64,
    ) -> None:
        self.reply = reply
        self.model = model
        self.encode = encode
        self.decode = decode
        self.policy_version = policy_version
        self.weights_digest = weights_digest
        self.delay_seconds = 0.0
        """Before each answer."""
        self.token_ids = True
        """False: the server knows nothing of `return_token_ids`."""
        self.logprobs_missing = 0
        """How many log-probs are left out at the end of each answer."""
        self.tool_name: str | None = None
        """Of the function that each answer calls, with the reply as its arguments."""
        self.can_stream = True
        """False: the server answers without a stream, whatever is asked."""
        self.gate: threading.Semaphore | None = None
        """What each event of a stream waits for."""
        self.edit_events: Callable[[list[bytes]], list[bytes]] = list
        """Changes the events of a stream; an empty one breaks the connection."""
        self.num_left_streams = 0
        """Streams that were not read to their end."""
        self.requests: list[dict[str, Any]] = []
        """Bodies of all calls, in order of arrival, failed ones included."""
        self.headers: list[dict[str, str]] = []
        """Their headers."""
        self._failures: list[tuple[int, float | None]] = []
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/policy", self._policy, methods=["GET"]),
        ]
        self._server = ThreadedServer(Starlette(routes=routes))

    @property
    def base_url(self) -> str:
        """Base URL for an OpenAI client."""
        return f"{self._server.url}/v1"

    @property
    def num_calls(self) -> int:
        """Calls that arrived."""
        return len(self.requests)

    def fail_next(
        self, times: int, status: int = 500, retry_after_seconds: float | None = None
    ) -> None:
        """Answer the next calls with an error status."""
        self._failures += [(status, retry_after_seconds)] * times

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop()

    async def _policy(self, _: Request) -> Response:
        """As an engine server of ours, but without digests of tokenizer and chat template."""
        served = {"version": self.policy_version, "weights_digest": self.weights_digest}
        return JSONResponse(served)

    async def _chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self._failures:
            status, retry_after = self._failures.pop(0)
            error = {"message": f"scripted failure {status}", "type": "scripted", "code": status}
            headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
            return JSONResponse({"error": error}, status, headers)
        headers = {
            "x-agl-policy-version": self.policy_version,
            "x-agl-weights-digest": self.weights_digest,
        }
        if body.get("stream") and self.can_stream:
            events = self._events(body)
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        answer = orjson.dumps(self._answer(body))
        return Response(answer, headers=headers, media_type="application/json")

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        events = self.edit_events(to_events(self._answer(body), with_usage=with_usage))
        is_read = False
        try:
            for event in events:
                # Polled: a thread that waits could not be stopped with its request.
                while self.gate and not self.gate.acquire(blocking=False):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                if not event:
                    raise ConnectionError("scripted end of the connection")
                yield event
            is_read = True
        finally:
            self.num_left_streams += not is_read

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        messages, seed = body["messages"], body.get("seed") or 0
        prompt = "".join(f"{m['role']}: {m.get('content')}\n" for m in messages) + "assistant: "
        text = self.reply(messages, seed)
        prompt_ids, ids = self.encode(prompt), self.encode(text)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or math.inf
        finish_reason = "stop"
        if len(ids) > limit:
            ids, finish_reason = ids[: int(limit)], "length"
            text = self.decode(ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.tool_name is not None:
            function = {"name": self.tool_name, "arguments": text}
            call = {"id": "call-1", "type": "function", "function": function}
            message, finish_reason = (
                {**message, "content": None, "tool_calls": [call]},
                "tool_calls",
            )
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(ids) if body.get("logprobs") else None,
            "finish_reason": finish_reason,
        }
        answer = {
            "id": f"chatcmpl-{seed:x}",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model", self.model),
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt_ids) + len(ids),
            },
        }
        if body.get("return_token_ids") and self.token_ids:
            answer["prompt_token_ids"] = prompt_ids
            choice["token_ids"] = ids
        return answer

    def _logprobs(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return a log-prob in nats for each id that depends on the id alone."""
        kept = ids[: len(ids) - self.logprobs_missing]
        return {
            "content": [
                {
                    "token": self.decode([i]),
                    "logprob": -(i % 8 + 1) / 8,
                    "bytes": None,
                    "top_logprobs": [],
                }
                for i in kept
            ]
        }


class FlakySpanStore(LightningStore):
    """The part of a store that takes spans, slow or away at first."""

    def __init__(self, *, failures: int = 0, delay_seconds: float = 0.0) -> None:
        self.failures = failures
        """How many calls still fail; spans that come with one are kept all the same."""
        self.delay_seconds = delay_seconds
        self.spans: list[Span] = []
        self.batch_sizes: list[int] = []
        self.num_calls = 0
        self._last_id = 0

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        """Return the next numbers."""
        await self._answer()
        first = self._last_id + 1
        self._last_id += len(rollout_attempt_ids)
        return range(first, self._last_id + 1)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Keep the spans that are new."""
        known = {span.span_id for span in self.spans}
        new = [span for span in spans if span.span_id not in known]
        self.spans += new
        await self._answer()
        self.batch_sizes.append(len(spans))
        return new

    async def _answer(self) -> None:
        self.num_calls += 1
        await asyncio.sleep(self.delay_seconds)
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("store is away")
