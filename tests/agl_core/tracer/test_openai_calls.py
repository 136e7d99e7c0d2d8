import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai._legacy_response import LegacyAPIResponse
from openai.resources.chat.completions import AsyncCompletions, Completions
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agl_core import semconv
from agl_core.adapter import TracerTraceToTriplet
from agl_core.emitter import operation
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.tracer import OtelTracer
from agl_core.types.resources import ProxyLLM
from agl_core.utils.threaded_server import ThreadedServer
from tests.fakes import ScriptedModelServer, encode_chars

ASK = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "extra_body": {"return_token_ids": True, "seed": 3},
}


@pytest.fixture
def server():
    with ScriptedModelServer() as server:
        yield server


@pytest.fixture
def tracer():
    tracer = OtelTracer()
    with tracer.lifespan():
        yield tracer


def sync_client(server):
    return openai.OpenAI(base_url=server.base_url, api_key="secret", max_retries=0)


def async_client(server):
    return openai.AsyncOpenAI(base_url=server.base_url, api_key="secret", max_retries=0)


def calls_of(trace):
    return [span for span in trace.recorded() if span.name == semconv.LLM_CALL_SPAN]


def check(call, text):
    assert json.loads(call.attributes[semconv.INPUT_MESSAGES]) == ASK["messages"]
    assert json.loads(call.attributes[semconv.OUTPUT_MESSAGES])[0]["content"] == text
    assert call.attributes[semconv.REQUEST_SEED] == 3
    assert call.attributes[semconv.RESPONSE_ID] == "chatcmpl-3"
    assert call.attributes[semconv.RESPONSE_TOKEN_IDS] == encode_chars(text)
    assert call.attributes[semconv.PROMPT_TOKEN_IDS]
    assert call.attributes[semconv.OUTPUT_TOKENS] == 8
    assert "secret" not in str(call)


async def test_calls_are_recorded_with_the_token_ids_that_came(server, tracer):
    async def agent(trace):
        with sync_client(server) as client:
            answer = await asyncio.to_thread(client.chat.completions.create, logprobs=True, **ASK)
        async with async_client(server) as client:
            again = await client.chat.completions.create(**ASK)
        first, second = calls_of(trace)
        text = answer.choices[0].message.content
        assert again.choices[0].message.content == text
        check(first, text)
        check(second, text)
        assert len(first.attributes[semconv.LOGPROBS]) == 8
        assert semconv.LOGPROBS not in second.attributes

    with tracer.attempt("ro-1", "at-1") as trace:
        await agent(trace)


def test_raw_responses_and_parsed_answers_are_recorded(server, tracer):
    class Anything(BaseModel):
        pass

    server.reply = lambda messages, seed: '{"a":1} '
    with tracer.attempt("ro-1", "at-1") as trace, sync_client(server) as client:
        raw = client.chat.completions.with_raw_response.create(**ASK)
        parsed = client.chat.completions.parse(response_format=Anything, **ASK)
    assert raw.parse().choices[0].message.content == '{"a":1} '
    assert isinstance(parsed.choices[0].message.parsed, Anything)
    for call in calls_of(trace):
        check(call, '{"a":1} ')


def test_a_call_is_below_the_operation_that_makes_it(server, tracer):
    with (
        tracer.attempt("ro-1", "at-1") as trace,
        sync_client(server) as client,
        operation(name="ask"),
    ):
        client.chat.completions.create(**ASK)
    call, asked, _ = trace.recorded()
    assert call.parent_id == asked.span_id


def test_messages_of_an_earlier_answer_can_be_sent(server, tracer):
    with tracer.attempt("ro-1", "at-1") as trace, sync_client(server) as client:
        answer = client.chat.completions.create(**ASK).choices[0].message
        history = [*ASK["messages"], answer, {"role": "user", "content": "more"}]
        client.chat.completions.create(model="m", messages=iter(history))
    sent = json.loads(calls_of(trace)[1].attributes[semconv.INPUT_MESSAGES])
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert server.requests[1]["messages"][2]["content"] == "more"


def test_a_failed_call_is_recorded_and_raised(server, tracer):
    server.fail_next(1, status=503)
    with (
        tracer.attempt("ro-1", "at-1") as trace,
        sync_client(server) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.chat.completions.create(**ASK)
    (call,) = calls_of(trace)
    assert call.status.status_code == "ERROR"
    assert call.status.description.startswith("InternalServerError")


def test_a_request_that_cannot_be_recorded_is_still_made(server, tracer, caplog, monkeypatch):
    def broken(body):
        raise KeyError("broken")

    monkeypatch.setattr("agl_core.tracer.openai_calls.request_attributes", broken)
    monkeypatch.setattr("agl_core.tracer.openai_calls.answer_attributes", broken)
    with tracer.attempt("ro-1", "at-1") as trace, sync_client(server) as client:
        assert client.chat.completions.create(**ASK).choices
    assert len(calls_of(trace)) == 1
    assert "not recorded" in caplog.text


async def test_what_the_proxy_records_is_not_recorded_twice(server, tracer):
    config = ProxyConfig(backend_url=server.base_url)
    async with ProxyServer(config, tracer) as proxy:
        llm: ProxyLLM = proxy.as_resource("m")
        with tracer.attempt("ro-1", "at-1") as trace:
            url = llm.get_base_url("ro-1", "at-1")
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
                await client.chat.completions.create(model="m", messages=ASK["messages"])
    (call,) = calls_of(trace)
    assert call.attributes[semconv.CALL_INDEX] == 0


def test_outside_of_attempts_and_of_other_tracers_nothing_is_recorded(server, tracer, caplog):
    other = OtelTracer()
    with sync_client(server) as client:
        client.chat.completions.create(**ASK)
        with other.attempt("ro-1", "at-1") as trace:
            client.chat.completions.create(**ASK)
    assert calls_of(trace) == []
    assert tracer.unattributed_spans == 0
    assert not caplog.records


def test_with_the_last_tracer_openai_is_as_it_was():
    before = [Completions.create, Completions.parse, AsyncCompletions.create]
    first, second = OtelTracer(), OtelTracer()
    first.init_worker(0)
    first.init_worker(1)
    second.init_worker(0)
    assert Completions.create is not before[0]
    first.teardown_worker(0)
    second.teardown_worker(0)
    second.teardown_worker(0)
    assert Completions.create is not before[0]
    first.teardown_worker(1)
    assert [Completions.create, Completions.parse, AsyncCompletions.create] == before
    with OtelTracer(instrument_openai=False).lifespan():
        assert Completions.create is before[0]


# Streams.

CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "ab"}, "token_ids": [1, 2]}]},
    {"choices": [{"index": 0, "delta": {"content": "c"}, "token_ids": [3]}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}},
]


class StreamServer(ThreadedServer):
    """Answers every call with `CHUNKS`."""

    def __init__(self) -> None:
        super().__init__(Starlette(routes=[Route("/v1/chat/completions", _chat, methods=["POST"])]))

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


async def _chat(request: Request) -> Response:
    await request.body()
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 0, "model": "m"}

    async def lines():
        for number, chunk in enumerate(CHUNKS):
            first = {"prompt_token_ids": [7, 8]} if number == 0 else {}
            yield f"data: {json.dumps({**head, **first, **chunk})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


@pytest.fixture(scope="module")
def stream_server():
    with StreamServer() as server:
        yield server


def check_stream(call):
    message = json.loads(call.attributes[semconv.OUTPUT_MESSAGES])[0]
    assert (message["role"], message["content"]) == ("assistant", "abc")
    assert call.attributes[semconv.PROMPT_TOKEN_IDS] == [7, 8]
    assert call.attributes[semconv.RESPONSE_TOKEN_IDS] == [1, 2, 3]
    assert call.attributes[semconv.OUTPUT_TOKENS] == 3
    assert call.attributes[semconv.FINISH_REASONS] == ["stop"]
    assert call.attributes[semconv.RESPONSE_ID] == "c1"


def test_a_stream_is_recorded_when_it_has_ended(stream_server, tracer):
    with tracer.attempt("ro-1", "at-1") as trace, sync_client(stream_server) as client:
        stream = client.chat.completions.create(stream=True, **ASK)
        assert calls_of(trace) == []
        assert len(list(stream)) == len(CHUNKS)
        raw = client.chat.completions.with_raw_response.create(stream=True, **ASK)
        assert len(list(raw.parse())) == len(CHUNKS)
    first, second = calls_of(trace)
    check_stream(first)
    check_stream(second)


async def test_so_is_an_async_one(stream_server, tracer):
    with tracer.attempt("ro-1", "at-1") as trace:
        async with async_client(stream_server) as client:
            stream = await client.chat.completions.create(stream=True, **ASK)
            assert len([chunk async for chunk in stream]) == len(CHUNKS)
            async with client.chat.completions.stream(**ASK) as events:
                final = await events.get_final_completion()
    assert final.choices[0].message.content == "abc"
    first, second = calls_of(trace)
    check_stream(first)
    check_stream(second)


def has_no_tokens(call):
    names = (semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS, semconv.LOGPROBS)
    return not any(name in call.attributes for name in names)


def text_of(call):
    return json.loads(call.attributes[semconv.OUTPUT_MESSAGES])[0]["content"]


async def test_a_stream_that_is_closed_has_its_text_so_far_and_no_tokens(stream_server, tracer):
    with tracer.attempt("ro-1", "at-1") as trace:
        with (
            sync_client(stream_server) as client,
            client.chat.completions.create(stream=True, **ASK) as stream,
        ):
            next(stream)
            next(stream)
        async with (
            async_client(stream_server) as client,
            await client.chat.completions.create(stream=True, **ASK) as stream,
        ):
            await anext(stream)
            await anext(stream)
    for call in calls_of(trace):
        assert text_of(call) == "ab"
        assert has_no_tokens(call)
    assert len(calls_of(trace)) == 2


async def test_a_stream_that_is_left_ends_with_its_attempt(stream_server, tracer):
    with tracer.attempt("ro-1", "at-1") as trace:
        with sync_client(stream_server) as client:
            for chunk in client.chat.completions.create(stream=True, **ASK):
                if chunk.choices[0].delta.content == "ab":
                    break
        assert calls_of(trace) == []
    (call,) = calls_of(trace)
    assert has_no_tokens(call)
    assert tracer.late_spans == 0


def read_stream(stream_server, tracer):
    """Return the recorded call of a stream that is read to its end."""
    with tracer.attempt("ro-1", "at-1") as trace, sync_client(stream_server) as client:
        list(client.chat.completions.create(stream=True, **ASK))
    (call,) = calls_of(trace)
    return call, TracerTraceToTriplet().adapt_with_report(trace.recorded())


def with_chunks(monkeypatch, *chunks):
    monkeypatch.setattr(f"{__name__}.CHUNKS", list(chunks))


def piece(text, ids, index=0, **choice):
    entry = {"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    delta = {"role": "assistant", "content": text, **choice.pop("delta", {})}
    logprobs = {"content": [entry] * len(ids)}
    return {
        "choices": [
            {"index": index, "delta": delta, "token_ids": ids, "logprobs": logprobs, **choice}
        ]
    }


def test_a_stream_with_a_chunk_that_cannot_be_recorded_has_no_tokens(
    stream_server, tracer, monkeypatch, caplog
):
    odd = {"reasoning_details": [{"type": "t", "text": "x"}]}
    with_chunks(
        monkeypatch,
        piece("a", [1], delta=odd),
        piece("b", [2], delta=odd),
        piece("c", [3], finish_reason="stop"),
    )
    call, result = read_stream(stream_server, tracer)
    assert has_no_tokens(call)
    assert result.triplets == []
    assert [str(drop.reason) for drop in result.report.dropped] == ["no_token_ids"]
    assert "chunk of a model call not recorded" in caplog.text


def test_a_stream_that_is_cut_off_has_no_tokens(stream_server, tracer, monkeypatch):
    with_chunks(monkeypatch, piece("a", [1]), piece("b", [2]))
    call, result = read_stream(stream_server, tracer)
    assert text_of(call) == "ab"
    assert has_no_tokens(call)
    assert [str(drop.reason) for drop in result.report.dropped] == ["no_token_ids"]


def test_of_several_streamed_choices_the_first_one_is_recorded(stream_server, tracer, monkeypatch):
    with_chunks(
        monkeypatch,
        piece("a", [1]),
        piece("x", [8], index=1),
        {"choices": piece("y", [9], 1)["choices"] + piece("b", [2])["choices"]},
        piece("z", [7], index=1, finish_reason="stop"),
        piece("c", [3], finish_reason="stop"),
    )
    call, result = read_stream(stream_server, tracer)
    assert text_of(call) == "abc"
    assert call.attributes[semconv.RESPONSE_TOKEN_IDS] == [1, 2, 3]
    assert call.attributes[semconv.LOGPROBS] == [-0.5] * 3
    assert len(result.triplets) == 1


def test_calls_with_the_same_response_id_are_different_calls(stream_server, tracer):
    with tracer.attempt("ro-1", "at-1") as trace, sync_client(stream_server) as client:
        for _ in range(3):
            list(client.chat.completions.create(stream=True, **ASK))
    assert [call.attributes[semconv.CALL_INDEX] for call in calls_of(trace)] == [0, 1, 2]
    assert len(TracerTraceToTriplet().adapt(trace.recorded())) == 3


def test_a_call_in_a_thread_without_the_context_is_counted_and_named_once(server, tracer, caplog):
    with (
        sync_client(server) as client,
        tracer.attempt("ro-1", "at-1") as trace,
        ThreadPoolExecutor() as pool,
    ):
        for _ in range(2):
            assert pool.submit(client.chat.completions.create, **ASK).result().choices
    assert calls_of(trace) == []
    assert tracer.unattributed_calls == 2
    assert caplog.text.count("outside of any attempt is not recorded") == 1


def test_a_raw_response_is_the_agents_to_parse(server, tracer, monkeypatch):
    def broken(self, **kwargs):
        raise ValueError("not JSON")

    monkeypatch.setattr(LegacyAPIResponse, "parse", broken)
    with tracer.attempt("ro-1", "at-1") as trace, sync_client(server) as client:
        assert client.chat.completions.with_raw_response.create(**ASK).text
    (call,) = calls_of(trace)
    assert call.status.description == "ValueError: not JSON"


def test_an_error_without_text_is_recorded_and_raised(server, tracer, monkeypatch):
    class TextlessError(Exception):
        def __str__(self):
            raise AttributeError("missing")

    def fail(*args, **kwargs):
        raise TextlessError

    monkeypatch.setattr(openai.OpenAI, "post", fail)
    with (
        tracer.attempt("ro-1", "at-1") as trace,
        sync_client(server) as client,
        pytest.raises(TextlessError),
    ):
        client.chat.completions.create(**ASK)
    (call,) = calls_of(trace)
    assert call.status.description.startswith("TextlessError: <")
