"""Whatever a model server answers, the agent gets an answer of its dialect, and the call its span.

Answers are recorded ones with something wrong in them: values of another type, streams that are cut
or disordered, headers and status lines that are none. They come from a seed.
"""

import copy
import logging
import os
import random
import socketserver
import threading
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest

from agl_core import semconv
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.llm_proxy.capture import find_defect
from agl_core.tracer import OtelTracer
from tests.streams import to_events

NUM_CASES = int(os.environ.get("AGL_FUZZ_CASES", "240"))
MESSAGES = [{"role": "user", "content": "hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": "hi"},
    "messages": {"messages": MESSAGES, "max_tokens": 4},
    "responses": {"input": "hi"},
}
WRONG: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**63, 1e308, 0.5, "", "x", "7", "\u0000", "é" * 50),
    *([], [None], ["x"], [[]], [{}], [-5], {}, {"x": 1}, {"index": "0"}, [{"index": None}]),
]
RAW = [b"NaN", b"-Infinity", b"1e999", b"9" * 400, b'"\\ud800"', b'"\xff"', b"[" * 2000, b"tru"]
HEADERS = [
    b"x-request-id: a\x01b",
    b"x-request-id: caf\xe9",
    b"x-request-id: \xf0\x9f\x98\x80",
    b"retry-after: -1",
    b"retry-after: \x7f",
    b"retry-after: nan",
    b"x-agl-policy-version: \xff\xfe",
    b"content-type: \xff/\xfe",
    b"content-type: text/event-stream; charset=\xe9",
    b"content-type: text/event-stream\x0b",
    b"content-type:",
    b"content-encoding: gzip",
    b"content-encoding: deflate",
    b"content-length: 7",
    b"content-length: x",
    b"transfer-encoding: chunked",
    b"location: ::::",
    b"bad header",
    b"\xff\xff: 1",
    b"set-cookie: \x00",
]
STATUSES = [100, 101, 204, 304, 302, 200, 201, 206, 299, 400, 418, 404, 600, 999, 99, 0]


class _Raw(socketserver.BaseRequestHandler):
    """Reads one request and answers with the next bytes."""

    def handle(self) -> None:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.request.recv(65536)
        head, _, body = received.partition(b"\r\n\r\n")
        lengths = [
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        ]
        length = sum(lengths)  # a request that follows a redirect has none
        while len(body) < length:
            body += self.request.recv(65536)
        self.request.sendall(self.server.answer)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    answer = b""


@contextmanager
def answering():
    """Give a server of raw answers, and an agent's client of the proxy before it."""
    tracer = OtelTracer()
    with _Server(("127.0.0.1", 0), _Raw) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        config = ProxyConfig(backend_url=url, max_tries=1, deadline_seconds=20)
        try:
            with (
                ProxyServer(config, tracer) as proxy,
                tracer.attempt("ro-1", "at-1") as trace,
                httpx.Client(base_url=f"{proxy.url}/rollout/ro-1/attempt/at-1/v1") as client,
            ):
                yield server, client, trace
        finally:
            server.shutdown()
            thread.join()


def whole(kind: str) -> dict[str, Any]:
    """Return an answer without fault."""
    answer: dict[str, Any] = {
        "id": "a-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    ids = [5, 6]
    if kind == "completions":
        logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25]}
        choice = {"text": "ab", "prompt_token_ids": [1, 2]}
    else:
        logprobs = {"content": [{"token": t, "logprob": -0.5, "bytes": [97]} for t in "ab"]}
        message: dict[str, Any] = {"role": "assistant", "content": "ab"}
        if kind == "tools":
            function = {"name": "f", "arguments": '{"a": 1}'}
            calls = [{"id": "c-1", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"message": message}
        answer["prompt_token_ids"] = [1, 2]
    answer["choices"] = [
        {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs, **choice}
    ]
    return answer


def events_of(kind: str) -> list[bytes]:
    """Return the events of a stream without fault."""
    answer = whole(kind)
    if kind != "completions":
        return to_events(answer)
    return [b"data: " + orjson.dumps(answer) + b"\n\n", b"data: [DONE]\n\n"]


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in inside:
        found.append((*place, key))
        if isinstance(item, dict | list):
            found += places(item, (*place, key))
    return found


def spoil_json(rng: random.Random, content: bytes) -> bytes:
    """Return a JSON object with some values that are wrong, missing or no JSON."""
    value = orjson.loads(content)
    raw = None
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not (ways := places(value)):
            break
        *way, last = rng.choice(ways)
        holder = value
        for key in way:
            holder = holder[key]
        if rng.random() < 0.2:
            del holder[last]
        elif rng.random() < 0.15 and raw is None:
            raw = rng.choice(RAW)
            holder[last] = "<raw>"
        else:
            holder[last] = copy.deepcopy(rng.choice(WRONG))
    content = orjson.dumps(value)
    return content if raw is None else content.replace(b'"<raw>"', raw)


def spoil_events(rng: random.Random, events: list[bytes]) -> bytes:
    """Return a stream with something wrong in it."""
    events = list(events)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(events))
        match rng.randrange(6):
            case 0 if events[at].startswith(b"data: {"):
                try:
                    events[at] = b"data: " + spoil_json(rng, events[at][6:]) + b"\n\n"
                except orjson.JSONDecodeError:
                    continue
            case 1:
                events[at] = events[at][: rng.randrange(len(events[at]) + 1)]
            case 2:
                events.insert(at, rng.choice(events))
            case 3:
                events[at] = b"data: " + orjson.dumps(rng.choice(WRONG)) + b"\n\n"
            case 4:
                events[at] = rng.randbytes(rng.randrange(1, 40)) + b"\n\n"
            case _:
                rng.shuffle(events)
    return b"".join(events)


def make_answer(rng: random.Random, path: str, *, stream: bool) -> bytes:
    """Return the bytes of an answer."""
    kind = "completions" if path == "completions" else rng.choice(("text", "tools"))
    media_type = b"text/event-stream" if stream else b"application/json"
    status, headers = 200, [b"content-type: " + media_type]
    body = b"".join(events_of(kind)) if stream else orjson.dumps(whole(kind))
    if rng.random() < 0.75:
        body = spoil_events(rng, events_of(kind)) if stream else spoil_json(rng, body)
    else:
        match rng.randrange(5):
            case 0:
                status = rng.choice(STATUSES)
            case 1:
                headers.insert(rng.randrange(2), rng.choice(HEADERS))
            case 2:
                status = rng.choice(STATUSES)
                headers = [rng.choice(HEADERS)]
            case 3:
                body = body[: rng.randrange(len(body))]
            case _:
                body = rng.choice((b"", b"{}", b"[]", b"null", b"<html>", b'{"error": 5}', b"\xff"))
    head = [b"HTTP/1.1 %d x" % status, *headers, b"connection: close"]
    answer = b"\r\n".join([*head, b"", body])
    return answer if rng.random() < 0.97 else rng.randbytes(rng.randrange(60))


def check_case(server: _Server, client: httpx.Client, trace: Any, seed: int) -> None:
    """Hold one answer, what the agent got of it, and its span against each other."""
    rng = random.Random(seed)
    path = rng.choice(list(ASKS))
    stream = rng.random() < 0.5
    server.answer = make_answer(rng, path, stream=stream)
    num_before = len(trace.spans())
    response = client.post(f"/{path}", json={"model": "m", "stream": stream, **ASKS[path]})
    (span,) = trace.spans()[num_before:]
    assert span.name == semconv.LLM_CALL_SPAN
    assert response.status_code != 500, response.text
    if response.status_code == 502:
        error = response.json()["error"]
        assert len(error["message"]) > 10
        assert not span.status.is_ok
        assert span.status.description
    elif response.status_code != 200 or has_error(response.content):
        assert not span.status.is_ok
    if span.status.is_ok:
        assert find_defect(span.attributes) is None
        assert all(type(i) is int for i in span.attributes[semconv.RESPONSE_TOKEN_IDS])
        if not stream:
            check_answer(path, response.json())


def has_error(content: bytes) -> bool:
    """Say whether a stream ends in an error event."""
    return b'"error":{' in content or b"event: error" in content


def check_answer(path: str, answer: dict[str, Any]) -> None:
    """Hold an answer that counts as whole against its dialect."""
    if path == "messages":
        blocks = answer["content"]
        assert all(isinstance(b.get("text", b.get("name")), str) for b in blocks)
    elif path == "responses":
        for item in answer["output"]:
            parts = item.get("content") or ()
            assert all(isinstance(part["text"], str) for part in parts)
    elif path == "completions":
        assert isinstance(answer["choices"][0]["text"], str)
    else:
        message = answer["choices"][0]["message"]
        assert isinstance(message.get("content"), str | None)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_finish_reason_that_is_no_text_is_told(path, stream):
    answer = whole("text")
    answer["choices"][0]["finish_reason"] = {"type": "stop"}
    body = b"".join(to_events(answer)) if stream else orjson.dumps(answer)
    media_type = b"text/event-stream" if stream else b"application/json"
    with answering() as (server, client, trace):
        server.answer = b"HTTP/1.1 200 OK\r\ncontent-type: " + media_type + b"\r\n\r\n" + body
        response = client.post(f"/{path}", json={"model": "m", "stream": stream, **ASKS[path]})
        span = trace.spans()[-1]
    assert response.status_code == (200 if stream else 502)
    assert "finish_reason" in (span.status.description if stream else response.text)
    assert not span.status.is_ok


@pytest.mark.parametrize("part", range(4))
def test_malformed_answers_are_told_in_a_sentence_and_never_fail_the_proxy(part, caplog):
    with answering() as setup, caplog.at_level(logging.ERROR):
        for seed in range(part, NUM_CASES, 4):
            try:
                check_case(*setup, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {setup[0].answer[:2000]!r}") from error
            assert not caplog.records, f"seed {seed}: {setup[0].answer[:2000]!r}"
