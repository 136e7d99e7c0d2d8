"""What a client receives through the proxy is what it receives from the model server itself."""

import itertools
import json
import threading
import time

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_core import semconv
from tests.agl_core.llm_proxy.replay import (
    TEXT,
    TEXT_STREAM,
    TOOLS,
    TOOLS_STREAM,
    TWO,
    TWO_STREAM,
    Recording,
    replaying,
)

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 5}
WHOLE = {"text": (TEXT, 1), "tools": (TOOLS, 1), "two": (TWO, 2)}
STREAMS = {"text": (TEXT_STREAM, 1), "tools": (TOOLS_STREAM, 1), "two": (TWO_STREAM, 2)}
IDS = {"text": (5, 6, 7), "tools": (5, 6, 7, 8), "two": (5, 6)}


def check_recorded(span, kind):
    """Ids and log-probs of every choice are the model server's own."""
    recorded = span.attributes
    assert span.status.is_ok
    assert recorded[semconv.PROMPT_TOKEN_IDS] == (1, 2, 3)
    assert recorded[semconv.RESPONSE_TOKEN_IDS] == IDS[kind]
    assert recorded[semconv.LOGPROBS] == tuple(-i / 8 for i in IDS[kind])
    if kind == "two":
        assert recorded["agentlightning.llm.choice.1.response_token_ids"] == (7, 8, 9)
        assert recorded["agentlightning.llm.choice.1.logprobs"] == (-7 / 8, -1.0, -9 / 8)
        assert recorded[semconv.FINISH_REASONS] == ("stop", "length")
        texts = [m["content"] for m in json.loads(recorded[semconv.OUTPUT_MESSAGES])]
        assert texts == ["one", "two"]


@pytest.mark.parametrize("kind", WHOLE)
def test_answer_is_the_same(kind):
    recording, n = WHOLE[kind]
    with replaying(recording) as setup:
        seen = [setup.openai(url).chat.completions.create(n=n, **ASK) for url in setup.urls]
        assert seen[0].to_dict() == seen[1].to_dict()
        check_recorded(setup.last_call(), kind)


@pytest.mark.parametrize("kind", STREAMS)
def test_stream_is_the_same(kind):
    recording, n = STREAMS[kind]
    with replaying(recording) as setup:
        seen = [
            [
                chunk.to_dict()
                for chunk in setup.openai(url).chat.completions.create(stream=True, n=n, **ASK)
            ]
            for url in setup.urls
        ]
        assert seen[0] == seen[1]
        assert len(seen[0]) == len(recording.plain) - 1
        check_recorded(setup.last_call(), kind)


@pytest.mark.parametrize("kind", STREAMS)
def test_bytes_of_a_stream_are_the_same_where_nothing_is_added(kind):
    recording, n = STREAMS[kind]
    everything = {
        "logprobs": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    with replaying(recording) as setup:
        body = {**ASK, "stream": True, "n": n, **everything}
        content = httpx.post(f"{setup.url}/chat/completions", json=body).content
    assert content == b"".join(recording.full)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_error_is_the_same(status, stream):
    body = json.dumps(
        {"error": {"message": "no", "type": "t", "param": "p", "code": status}}
    ).encode()
    headers = {"retry-after": "9", "x-request-id": "r-1"}
    with replaying(Recording([body], [body], status, headers), max_tries=1) as setup:
        seen = []
        for url in setup.urls:
            with pytest.raises(openai.APIStatusError) as caught:
                setup.openai(url).chat.completions.create(stream=stream, **ASK)
            error = caught.value
            kept = {name: error.response.headers[name] for name in headers}
            seen.append((type(error), error.status_code, error.message, error.body, kept))
        assert seen[0] == seen[1]
        assert not setup.last_call().status.is_ok


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("chat/completions", {"choices": [{"message": {}, "logprobs": 3}]}),
        ("chat/completions", {"choices": []}),
        ("chat/completions", {"choices": [{"message": {}}], "usage": 3}),
        ("chat/completions", []),
        ("completions", {"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}),
        ("messages", {"choices": [{"message": {"tool_calls": [{"id": "t"}]}}]}),
        ("responses", {"choices": [{"message": {"tool_calls": [{"id": "t"}]}}]}),
    ],
)
def test_answer_that_is_none_is_an_error(kind, answer):
    content = json.dumps(answer).encode()
    body = {**ASK, "prompt": "p", "input": "i"}
    wanted = {"messages": ("model", "messages"), "responses": ("model", "input")}
    body = {name: body[name] for name in wanted.get(kind, body)}
    with replaying(Recording([content], [content])) as setup:
        response = httpx.post(f"{setup.url}/{kind}", json=body)
        assert response.status_code == 502
        assert "the model server" in response.json()["error"]["message"]
        assert not setup.last_call().status.is_ok


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_each_piece_leaves_before_the_next_one_arrives(line_end):
    pieces = [piece.replace(b"\n", line_end) for piece in TEXT_STREAM.full]
    recording = Recording(pieces, pieces)
    arrivals, arrived = threading.Semaphore(0), []
    with replaying(recording, arrivals) as setup:
        body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{setup.url}/chat/completions", json=body) as response:
            for _ in response.iter_raw():
                arrived.append(time.monotonic())
                arrivals.release()
        sent = setup.server.sent
        assert setup.last_call().status.is_ok
    assert len(arrived) == len(sent) == 6
    for came, next_left in zip(arrived, sent[1:], strict=False):
        assert came < next_left


def read_split(setup, recording, cuts):
    """Return what the agent gets of a stream that is cut at these bytes, and what is recorded."""
    content = b"".join(recording.full)
    bounds = sorted({0, *cuts, len(content)})
    pieces = [content[a:b] for a, b in itertools.pairwise(bounds)]
    setup.server.recording = Recording(pieces, pieces)
    body = {**ASK, "stream": True, "n": 2 if recording is TWO_STREAM else 1}
    got = httpx.post(f"{setup.url}/chat/completions", json=body).content
    recorded = setup.last_call().attributes
    varying = (semconv.CALL_INDEX, semconv.SEQUENCE_ID)
    return got, {name: value for name, value in recorded.items() if name not in varying}


@pytest.fixture(scope="module")
def split_setup():
    with replaying(TEXT_STREAM) as setup:
        yield setup


@pytest.mark.parametrize("kind", STREAMS)
def test_stream_that_is_cut_at_every_byte_is_the_same(split_setup, kind):
    recording, _ = STREAMS[kind]
    everywhere = range(len(b"".join(recording.full)))
    expected = read_split(split_setup, recording, [])
    assert read_split(split_setup, recording, everywhere) == expected


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(sorted(STREAMS)), st.lists(st.integers(0, 1200), max_size=8))
def test_stream_that_is_cut_anywhere_is_the_same(split_setup, kind, cuts):
    recording, _ = STREAMS[kind]
    size = len(b"".join(recording.full))
    expected = read_split(split_setup, recording, [])
    assert read_split(split_setup, recording, [min(cut, size) for cut in cuts]) == expected
