"""Streams through the proxy, over real HTTP and to OpenAI's clients."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import orjson
import pytest

from agl_core import semconv
from agl_core.llm_proxy.relay import StreamedResponse
from agl_core.runner.failure import classify_exception
from agl_core.types.outcome import FailureKind
from agl_core.types.training import PolicyRef
from tests.agl_core.llm_proxy.test_app import MESSAGES, PATH, running, wait_until
from tests.fakes import scripted_reply
from tests.streams import DONE

EVERYTHING = {
    "logprobs": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
TOKEN_NAMES = (semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS, semconv.LOGPROBS)


def stream(setup, **body):
    body = {"model": "m", "messages": MESSAGES, "stream": True, "seed": 5, **body}
    return setup.client.stream("POST", PATH, json=body)


def read(setup, **body) -> bytes:
    with stream(setup, **body) as response:
        assert response.status_code == 200
        return b"".join(response.iter_raw())


def chunks_of(content: bytes):
    """Return what each event holds; the last one must be `[DONE]`."""
    *events, last, rest = content.split(b"\n\n")
    assert (last, rest) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


def error_of(content: bytes):
    event = content.split(b"\n\n")[-2]
    return orjson.loads(event.removeprefix(b"data: "))["error"]


def has_no_tokens(span) -> bool:
    return not span.status.is_ok and not any(name in span.attributes for name in TOKEN_NAMES)


def test_stream_is_recorded_as_the_same_call_without():
    with running() as setup:
        content = read(setup)
        streamed = setup.last_call()
        setup.call(seed=5)
        whole = setup.last_call()
        chunks = chunks_of(content)
    assert streamed.status.is_ok
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == scripted_reply(MESSAGES, 5)
    for name in (b"token_ids", b"usage", b'"logprob"'):
        assert name not in content
    different = {semconv.CALL_INDEX, semconv.SEQUENCE_ID}
    assert {k: v for k, v in streamed.attributes.items() if k not in different} == {
        k: v for k, v in whole.attributes.items() if k not in different
    }
    assert semconv.RESPONSE_TOKEN_IDS in streamed.attributes
    assert semconv.POLICY_VERSION in streamed.attributes


def test_what_was_asked_for_passes_byte_by_byte():
    with running() as setup:
        body = {"model": "m", "messages": MESSAGES, "stream": True, "seed": 5, **EVERYTHING}
        url = f"{setup.server.base_url}/chat/completions"
        assert read(setup, **EVERYTHING) == httpx.post(url, json=body).content


def test_each_event_leaves_before_the_next_one_comes_and_done_after_the_span():
    with running() as setup:
        setup.server.gate = threading.Semaphore(1)
        with stream(setup, **EVERYTHING) as response:
            received = []
            for content in response.iter_raw():
                assert content.count(b"\n\n") == 1
                received.append(content)
                assert bool(setup.trace.spans()) == (content == DONE)
                setup.server.gate.release()  # only now the model server writes the next one
        assert len(received) == 1 + 8 + 1 + 1
        assert received[-1] == DONE
        assert setup.last_call().status.is_ok


def test_a_stream_whose_record_is_being_written_when_the_attempt_ends_is_kept(monkeypatch):
    write = StreamedResponse._write_answer
    begun = threading.Event()

    def slow(self, reason):
        begun.set()
        time.sleep(0.3)
        write(self, reason)

    monkeypatch.setattr(StreamedResponse, "_write_answer", slow)
    with ThreadPoolExecutor(1) as pool:
        with running() as setup:
            pool.submit(read, setup)
            assert begun.wait(10)  # the block ends, and the attempt with it, while it is written
        call, _ = setup.trace.spans()
    assert call.status.is_ok
    assert semconv.RESPONSE_TOKEN_IDS in call.attributes


def test_stream_is_retried_before_its_first_byte():
    with running() as setup:
        setup.server.fail_next(2, 503, retry_after_seconds=0)
        breaks = [[b""], None]

        def edit(events):
            return breaks.pop(0) or events

        setup.server.edit_events = edit
        assert len(chunks_of(read(setup))) == 9
        assert setup.server.num_calls == 4
        assert setup.last_call().status.is_ok


def test_stream_that_breaks_off_is_an_error_and_not_retried():
    with running() as setup:
        setup.server.edit_events = lambda events: [*events[:4], b""]
        error = error_of(read(setup))
        span = setup.last_call()
        assert "the model server's stream broke off" in error["message"]
        assert (error["type"], error["code"]) == ("server_error", "stream_broken")
        assert setup.server.num_calls == 1
        assert span.status.description == error["message"]
        assert has_no_tokens(span)
        text = json.loads(span.attributes[semconv.OUTPUT_MESSAGES])[0]["content"]
        assert scripted_reply(MESSAGES, 5).startswith(text)
        assert len(text) == 3


def test_deadline_is_for_the_whole_stream():
    with running(deadline_seconds=0.5) as setup:
        setup.server.gate = threading.Semaphore(3)
        error = error_of(read(setup))
        assert error["code"] == "upstream_timeout"
        assert has_no_tokens(setup.last_call())
        wait_until(lambda: setup.server.num_left_streams == 1)


def test_nothing_before_the_deadline_is_a_504():
    with running(deadline_seconds=0.3) as setup:
        setup.server.gate = threading.Semaphore(0)
        with stream(setup) as response:
            assert response.status_code == 504
        assert not setup.last_call().status.is_ok


def test_agent_that_goes_away_stops_the_stream():
    with running() as setup:
        setup.server.gate = threading.Semaphore(3)
        with stream(setup) as response:
            next(response.iter_raw())
        wait_until(lambda: setup.trace.spans())
        span = setup.last_call()
        assert span.status.description == "the agent closed the connection before the answer"
        assert has_no_tokens(span)
        wait_until(lambda: setup.server.num_left_streams == 1)
        setup.server.gate = None
        assert len(chunks_of(read(setup))) == 9


def test_agent_that_stops_at_the_finish_reason_has_its_answer_recorded():
    with running() as setup:
        setup.server.gate = threading.Semaphore(9)
        with stream(setup) as response:
            for content in response.iter_raw():
                if b'"finish_reason":"stop"' in content:
                    break
        wait_until(lambda: setup.trace.spans())
        assert setup.last_call().status.is_ok
        assert len(setup.last_call().attributes[semconv.RESPONSE_TOKEN_IDS]) == 8


@pytest.mark.parametrize(("num_events", "is_whole"), [(3, False), (9, True)])
def test_stream_that_outlives_its_attempt_is_recorded_with_it(num_events, is_whole):
    with running() as setup:
        setup.server.gate = threading.Semaphore(num_events)
        with (
            setup.tracer.attempt("ro-1", "at-2") as trace,
            openai.OpenAI(**options(urls(setup)[1].replace("at-1", "at-2"))) as client,
        ):
            chunks = iter(client.chat.completions.create(stream=True, **ASK))
            for _ in range(num_events):
                next(chunks)
            assert trace.spans() == []
        call, _ = trace.spans()
        assert call.status.is_ok == is_whole
        assert has_no_tokens(call) != is_whole
        assert setup.tracer.late_spans == 0


def drop(*numbers):
    return lambda events: [event for n, event in enumerate(events) if n not in numbers]


@pytest.mark.parametrize(
    ("edit", "reason", "agent_gets"),
    [
        (drop(8, 9, 10), "the stream ended before the answer did", b"stream_broken"),
        (drop(8), "the stream ended without a finish reason", DONE),
        (drop(3), "7 response token ids came, the model server counts 8", DONE),
        (lambda e: [*e[:3], b"data: {oops\n\n", *e[3:]], "a chunk is not JSON", b"{oops\n\n"),
        (lambda e: [*e[:3], b"data: [1]\n\n", *e[3:]], "a chunk is not one of", b"[1]\n\n"),
        (lambda e: [*e[:3], b'data: {"error":"x"}\n\n', DONE], "broke off: x", b'{"error":"x"}'),
        (lambda e: [*e[:3], b'data: {"ch'], "ended before the answer", b"stream_broken"),
    ],
)
def test_stream_that_is_not_whole_has_no_token_ids(edit, reason, agent_gets):
    with running() as setup:
        setup.server.edit_events = edit
        assert agent_gets in read(setup)
        assert reason in setup.last_call().status.description
        assert has_no_tokens(setup.last_call())


@pytest.mark.parametrize(
    "edit", [drop(10), lambda events: [*events[:-1], b"data: [DO"]], ids=["left out", "cut short"]
)
def test_stream_whose_choices_have_finished_is_whole_without_its_last_event(edit):
    with running() as setup:
        whole = read(setup)
        setup.server.edit_events = edit
        assert whole.startswith(read(setup))
        first, second = setup.trace.spans()
        assert second.status.is_ok
        for name in TOKEN_NAMES:
            assert first.attributes[name] == second.attributes[name]


def test_events_split_anywhere_are_the_same_for_the_agent():
    def byte_by_byte(events):
        content = b"".join(events)
        return [content[n : n + 7] for n in range(0, len(content), 7)]

    with running() as setup:
        whole = read(setup)
        setup.server.edit_events = byte_by_byte
        assert read(setup) == whole
        first, second = setup.trace.spans()
        for name in TOKEN_NAMES:
            assert first.attributes[name] == second.attributes[name]


@pytest.mark.parametrize("status", [400, 404])
def test_error_of_the_backend_passes_through(status):
    with running() as setup:
        setup.server.fail_next(1, status)
        with stream(setup) as response:
            assert response.status_code == status
            assert f"scripted failure {status}" in response.read().decode()
        reason = f"the model server answered HTTP {status}: scripted failure {status}"
        assert setup.last_call().status.description == reason


def test_stream_of_another_policy_is_refused():
    policy = PolicyRef(version="v000001", weights_digest="1" * 64, path="/base")
    with running(policy=policy) as setup:
        with stream(setup) as response:
            assert response.status_code == 503
            assert response.headers["content-type"] == "application/json"
            response.read()
            assert response.json()["error"]["code"] == "other_policy"
        assert has_no_tokens(setup.last_call())


def test_answer_that_is_no_stream_is_refused():
    with running() as setup:
        setup.server.can_stream = False
        with stream(setup) as response:
            assert response.status_code == 502
            assert "not an event stream" in response.read().decode()


# OpenAI's clients.

ASK = {"model": "m", "messages": MESSAGES, "seed": 5}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def urls(setup):
    """Return the base URLs of the model server and of the proxy before it."""
    return setup.server.base_url, f"{setup.proxy.url}{PATH.removesuffix('/chat/completions')}"


def options(url):
    return {"base_url": url, "api_key": "x", "max_retries": 0}


@pytest.mark.parametrize("tool_name", [None, "add"])
def test_client_gets_what_it_gets_from_the_model_server(tool_name):
    with running() as setup:
        setup.server.tool_name = tool_name
        seen = []
        for url in urls(setup):
            with openai.OpenAI(**options(url)) as client:
                chunks = list(client.chat.completions.create(stream=True, tools=TOOLS, **ASK))
                with client.chat.completions.stream(tools=TOOLS, **ASK) as events:
                    kinds = [event.type for event in events]
                    final = events.get_final_completion()
            seen.append(([chunk.to_dict() for chunk in chunks], kinds, final.to_dict()))
        assert seen[0] == seen[1]
        message = final.choices[0].message
        text = message.tool_calls[0].function.arguments if tool_name else message.content
        assert text == scripted_reply(MESSAGES, 5)
        assert [span.status.is_ok for span in setup.trace.spans()] == [True, True]
        recorded = json.loads(setup.last_call().attributes[semconv.OUTPUT_MESSAGES])[0]
        assert bool(recorded.get("tool_calls")) == bool(tool_name)


@pytest.mark.parametrize("tool_name", [None, "add"])
async def test_so_does_the_async_one(tool_name):
    with running() as setup:
        setup.server.tool_name = tool_name
        seen = []
        for url in urls(setup):
            async with openai.AsyncOpenAI(**options(url)) as client:
                answer = await client.chat.completions.create(
                    stream=True, tools=TOOLS, stream_options={"include_usage": True}, **ASK
                )
                chunks = [chunk.to_dict() async for chunk in answer]
                async with client.chat.completions.stream(tools=TOOLS, **ASK) as events:
                    final = await events.get_final_completion()
            seen.append((chunks, final.to_dict()))
        assert seen[0] == seen[1]
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        assert [span.status.is_ok for span in setup.trace.spans()] == [True, True]


def test_client_raises_where_the_stream_breaks_off():
    with running() as setup, openai.OpenAI(**options(urls(setup)[1])) as client:
        setup.server.edit_events = lambda events: [*events[:4], b""]
        with pytest.raises(openai.APIError, match="stream broke off") as caught:
            list(client.chat.completions.create(stream=True, **ASK))
        assert classify_exception(caught.value) == FailureKind.INFRA_ERROR
