"""A model server that replays recorded bytes, in vLLM's dialect, and clients before it.

Each recording has the bytes for who asks for nothing, and those for who asks for token ids,
log-probs and usage, as the proxy does.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import openai
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agl_core import semconv
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.tracer import OtelTracer
from agl_core.utils.threaded_server import ThreadedServer


@dataclass
class Recording:
    """What the server sends."""

    plain: Sequence[bytes]
    """Pieces for who asks for nothing."""
    full: Sequence[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class ReplayServer:
    """Replays one recording for every call of a kind, piece by piece.

    Args:
        recording: Of the answer.
        arrivals: Released for each piece that the client has; none is sent before the one before it
            arrived, or 10 s have passed. None to send them all.
    """

    def __init__(self, recording: Recording, arrivals: threading.Semaphore | None = None) -> None:
        self.recording = recording
        self.arrivals = arrivals
        self.sent: list[float] = []
        """When each piece of the last answer was sent."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        route = Route("/v1/{kind:path}", self._replay, methods=["POST"])
        self._server = ThreadedServer(Starlette(routes=[route]))

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop()

    @property
    def base_url(self) -> str:
        return f"{self._server.url}/v1"

    async def _replay(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        found = self.recording
        pieces = found.full if body.get("return_token_ids") else found.plain
        is_stream = body.get("stream") and found.status == 200
        media_type = "text/event-stream" if is_stream else "application/json"
        if not is_stream:
            return Response(b"".join(pieces), found.status, found.headers, media_type)

        async def send() -> AsyncGenerator[bytes]:
            self.sent = []
            for number, piece in enumerate(pieces):
                if number and self.arrivals is not None:
                    await asyncio.to_thread(self.arrivals.acquire, timeout=10.0)
                await asyncio.sleep(0)
                self.sent.append(time.monotonic())
                yield piece

        return StreamingResponse(send(), found.status, found.headers, media_type)


@contextmanager
def replaying(recording: Recording, arrivals: threading.Semaphore | None = None, **config: Any):
    """Give server, proxy before it, and an open attempt's trace and base URL."""
    tracer = OtelTracer()
    with (
        ReplayServer(recording, arrivals) as server,
        ProxyServer(ProxyConfig(backend_url=server.base_url, **config), tracer) as proxy,
        tracer.attempt("ro-1", "at-1") as trace,
        ExitStack() as clients,
    ):
        yield Replayed(server, proxy, trace, clients)


@dataclass
class Replayed:
    server: ReplayServer
    proxy: ProxyServer
    trace: Any
    clients: ExitStack

    def openai(self, url: str | None = None) -> openai.OpenAI:
        """Return a client that is closed at the end, through the proxy unless the URL is given."""
        client = openai.OpenAI(base_url=url or self.url, api_key="x", max_retries=0)
        return self.clients.enter_context(client)

    @property
    def url(self) -> str:
        """Base URL of the attempt."""
        return f"{self.proxy.url}/rollout/ro-1/attempt/at-1/v1"

    @property
    def urls(self) -> tuple[str, str]:
        """Of the server itself, and through the proxy."""
        return self.server.base_url, self.url

    def last_call(self) -> Any:
        """The proxy's last span; Anthropic's client may leave one of its own."""
        return [s for s in self.trace.spans() if s.name == semconv.LLM_CALL_SPAN][-1]


HEAD = {"id": "c-1", "created": 7, "model": "m"}
IDS = ("token_ids", "prompt_token_ids", "logprobs", "usage")


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def without_ids(value: dict[str, Any]) -> dict[str, Any]:
    """Return an answer or a chunk as it is for who asks for nothing."""
    plain = {k: v for k, v in value.items() if k != "prompt_token_ids"}
    plain["choices"] = [
        {k: (None if k == "logprobs" else v) for k, v in choice.items() if k not in IDS[:2]}
        for choice in value["choices"]
    ]
    return plain


def whole(answer: dict[str, Any]) -> Recording:
    """Return the recording of an answer without a stream."""
    return Recording([orjson.dumps(without_ids(answer))], [orjson.dumps(answer)])


def streamed(chunks: Sequence[dict[str, Any]], usage: dict[str, int] | None = None) -> Recording:
    """Return the recording of a stream."""
    full = [event(chunk) for chunk in chunks]
    if usage:
        head = {k: v for k, v in chunks[0].items() if k not in ("choices", "prompt_token_ids")}
        full.append(event({**head, "choices": [], "usage": usage}))
    return Recording([*(event(without_ids(chunk)) for chunk in chunks), DONE], [*full, DONE])


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def logprobs(ids: Sequence[int]) -> dict[str, Any]:
    content = [{"token": str(i), "logprob": -i / 8, "bytes": None, "top_logprobs": []} for i in ids]
    return {"content": content}


def choice(index: int, message: dict[str, Any], ids: Sequence[int], reason: str) -> dict[str, Any]:
    """Return a choice of a chat completion."""
    return {
        "index": index,
        "message": {"role": "assistant", **message},
        "logprobs": logprobs(ids),
        "finish_reason": reason,
        "token_ids": list(ids),
    }


def chat(*choices: dict[str, Any]) -> dict[str, Any]:
    """Return a chat completion."""
    count = sum(len(choice["token_ids"]) for choice in choices)
    return {
        **HEAD,
        "object": "chat.completion",
        "choices": list(choices),
        "usage": usage(3, count),
        "prompt_token_ids": [1, 2, 3],
    }


def delta(index: int, part: dict[str, Any], ids: Sequence[int] = (), reason: str | None = None):
    """Return a chunk of a chat completion; the first one of a choice has no ids."""
    streamed_choice: dict[str, Any] = {
        "index": index,
        "delta": part,
        "logprobs": logprobs(ids) if ids else None,
        "finish_reason": reason,
    }
    chunk = {**HEAD, "object": "chat.completion.chunk", "choices": [streamed_choice]}
    if ids:
        streamed_choice["token_ids"] = list(ids)
    elif "role" in part and index == 0:
        chunk["prompt_token_ids"] = [1, 2, 3]
    return chunk


def call_delta(number: int, arguments: str, **head: str) -> dict[str, Any]:
    """Return the delta of a tool call: its head with id and name, or a piece of its arguments."""
    function: dict[str, str] = {"arguments": arguments}
    entry: dict[str, Any] = {"index": number, "function": function}
    if head:
        function["name"] = head["name"]
        entry |= {"id": head["id"], "type": "function"}
    return {"tool_calls": [entry]}


TOOL_CALLS = [
    {"id": "t-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    {"id": "t-2", "type": "function", "function": {"name": "sub", "arguments": '{"b": 2}'}},
]
TEXT = whole(chat(choice(0, {"content": "a\u00e9c"}, [5, 6, 7], "stop")))
TOOLS = whole(
    chat(choice(0, {"content": None, "tool_calls": TOOL_CALLS}, [5, 6, 7, 8], "tool_calls"))
)
TWO = whole(
    chat(
        choice(0, {"content": "one"}, [5, 6], "stop"),
        choice(1, {"content": "two"}, [7, 8, 9], "length"),
    )
)
ROLE = {"role": "assistant", "content": ""}
TEXT_STREAM = streamed(
    [
        delta(0, ROLE),
        delta(0, {"content": "a"}, [5]),
        delta(0, {"content": "\u00e9"}, [6]),
        delta(0, {"content": "c"}, [7], "stop"),
    ],
    usage(3, 3),
)
TOOLS_STREAM = streamed(
    [
        delta(0, {"role": "assistant", "content": None}),
        delta(0, call_delta(0, "", id="t-1", name="add"), [5]),
        delta(0, call_delta(0, '{"a": 1}'), [6]),
        delta(0, call_delta(1, "", id="t-2", name="sub"), [7]),
        delta(0, call_delta(1, '{"b": 2}'), [8], "tool_calls"),
    ],
    usage(3, 4),
)
TWO_STREAM = streamed(
    [
        delta(0, ROLE),
        delta(1, ROLE),
        delta(1, {"content": "tw"}, [7]),
        delta(0, {"content": "one"}, [5]),
        delta(0, {"content": ""}, [6], "stop"),
        delta(1, {"content": "o"}, [8, 9], "length"),
    ],
    usage(3, 5),
)
