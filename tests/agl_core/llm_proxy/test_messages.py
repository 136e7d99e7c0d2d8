"""Anthropic's client through the proxy."""

import json

import pytest

from agl_core import semconv
from agl_core.llm_proxy.messages import MessagesDialect
from agl_core.llm_proxy.refusal import Refusal
from tests.agl_core.llm_proxy.replay import (
    DONE,
    ROLE,
    TEXT,
    TEXT_STREAM,
    TOOLS,
    TOOLS_STREAM,
    Recording,
    call_delta,
    chat,
    choice,
    delta,
    event,
    replaying,
    streamed,
    usage,
    whole,
)

anthropic = pytest.importorskip("anthropic", reason="in the extra `dev`")

ASK = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def client(setup, **options):
    base_url = setup.url.removesuffix("/v1")  # Anthropic's clients add it
    options = {"base_url": base_url, "api_key": "x", "max_retries": 0, **options}
    return setup.clients.enter_context(anthropic.Anthropic(**options))


def ask(**body):
    return MessagesDialect().ask({**ASK, **body})


def test_answer_is_a_message_and_recorded_as_a_chat_completion():
    with replaying(TEXT) as setup:
        message = client(setup).messages.create(
            **ASK, system="be brief", extra_body={"temperature": 0.5}
        )
        span = setup.last_call()
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "a\u00e9c"}]
    assert (message.id, message.model, message.role) == ("msg_c-1", "m", "assistant")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 3)
    asked = setup.server.requests[0]
    assert asked["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert (asked["max_tokens"], asked["temperature"], asked["logprobs"]) == (20, 0.5, True)
    assert span.status.is_ok
    assert span.attributes[semconv.RESPONSE_TOKEN_IDS] == (5, 6, 7)
    assert span.attributes[semconv.PROMPT_TOKEN_IDS] == (1, 2, 3)
    assert json.loads(span.attributes[semconv.INPUT_MESSAGES]) == asked["messages"]


def test_tool_calls_are_tool_uses():
    with replaying(TOOLS) as setup:
        message = client(setup).messages.create(**ASK, tools=[TOOL], tool_choice={"type": "any"})
    assert message.stop_reason == "tool_use"
    assert [(b.type, b.id, b.name, b.input) for b in message.content] == [
        ("tool_use", "t-1", "add", {"a": 1}),
        ("tool_use", "t-2", "sub", {"b": 2}),
    ]
    asked = setup.server.requests[0]
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert asked["tools"] == [{"type": "function", "function": function}]
    assert asked["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("recording", "plain"), [(TEXT_STREAM, TEXT), (TOOLS_STREAM, TOOLS)], ids=["text", "tools"]
)
def test_streamed_message_is_the_same_as_the_whole_one(recording, plain):
    with replaying(plain) as setup:
        expected = client(setup).messages.create(**ASK)
        first = setup.last_call().attributes
    with replaying(recording) as setup:
        with client(setup).messages.stream(**ASK) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_message()
        span = setup.last_call()
    assert message.to_dict(exclude_none=True) == expected.to_dict(exclude_none=True)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert span.status.is_ok
    for name in (semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS, semconv.LOGPROBS):
        assert span.attributes[name] == first[name]


def test_text_before_tool_calls_keeps_its_place_in_a_stream():
    recording = streamed(
        [
            delta(0, ROLE),
            delta(0, {"content": "so"}, [5]),
            delta(0, call_delta(0, '{"a"', id="t-1", name="add"), [6]),
            delta(0, call_delta(0, ": 1}"), [7], "tool_calls"),
        ],
        usage(3, 3),
    )
    with (
        replaying(recording) as setup,
        client(setup).messages.stream(**ASK, tools=[TOOL]) as stream,
    ):
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].input == {"a": 1}


@pytest.mark.parametrize(
    ("reason", "more", "stop"),
    [
        ("stop", {}, ("end_turn", None)),
        ("stop", {"stop_reason": "\n\n"}, ("stop_sequence", "\n\n")),
        ("stop", {"stop_reason": 151645}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
    ],
)
def test_stop_reasons(reason, more, stop):
    answer = chat({**choice(0, {"content": "x"}, [5], reason), **more})
    message = MessagesDialect().answer(answer, ASK)
    assert (message["stop_reason"], message["stop_sequence"]) == stop


def test_a_client_that_would_have_threads_kept_sends_its_whole_conversation():
    with replaying(TEXT) as setup:
        runner = client(setup).beta.messages.tool_runner(**ASK, tools=[])
        assert runner.until_done().content[0].text == "a\u00e9c"
        (asked,) = setup.server.requests
        assert asked["messages"] == ASK["messages"]
        with pytest.raises(anthropic.BadRequestError, match="threads are not kept here"):
            client(setup).beta.messages.create(**ASK, thread={"type": "create"})


def test_conversation_with_tool_results_is_one_of_chat_completions():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t-1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t-2", "name": "add", "input": {"INVALID_JSON": "{a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t-1", "content": "1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t-2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no JSON"}],
                },
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    asked = ask(messages=messages, system=system, stop_sequences=["END"])
    assert asked["stop"] == ["END"]
    assert asked["messages"] == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [
                {
                    "id": "t-1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a":1}'},
                },
                {"id": "t-2", "type": "function", "function": {"name": "add", "arguments": "{a"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t-1", "content": "1"},
        {"role": "tool", "tool_call_id": "t-2", "content": "no JSON"},
        {"role": "user", "content": "go on"},
    ]


def test_arguments_that_are_no_object_are_handed_on_as_text():
    call = {"id": "t-1", "type": "function", "function": {"name": "add", "arguments": "{a"}}
    answer = chat(choice(0, {"content": None, "tool_calls": [call]}, [5], "tool_calls"))
    (block,) = MessagesDialect().answer(answer, ASK)["content"]
    assert block["input"] == {"INVALID_JSON": "{a"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking is not supported"),
        ({"thinking": True}, "thinking is not supported"),
        ({"thinking": ["x"]}, "thinking is not supported"),
        ({"mcp_servers": []}, "mcp_servers is not supported"),
        ({"messages": 3}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "not one of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "'thinking'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "run at Anthropic only"),
        ({"tool_choice": {"type": "other"}}, "'other'"),
    ],
)
def test_what_chat_completions_have_not_is_refused(body, words):
    with pytest.raises(Refusal, match=words) as caught:
        ask(**body)
    assert caught.value.status == 400


def test_errors_are_raised_by_the_client():
    body = json.dumps({"error": {"message": "too long", "type": "x", "code": 400}}).encode()
    with replaying(Recording([body], [body], 400)) as setup:
        with pytest.raises(anthropic.BadRequestError, match="too long") as caught:
            client(setup).messages.create(**ASK)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="thinking is not supported"):
            client(setup).messages.create(
                **ASK, thinking={"type": "enabled", "budget_tokens": 1024}
            )


def test_stream_that_breaks_off_is_raised_by_the_client():
    cut = Recording([], [*TEXT_STREAM.full[:2], event({"error": {"message": "out of memory"}})])
    with (
        replaying(cut) as setup,
        pytest.raises(anthropic.APIError, match="out of memory"),
        client(setup).messages.stream(**ASK) as stream,
    ):
        stream.get_final_message()
    assert not setup.trace.spans()[0].status.is_ok


@pytest.mark.parametrize(
    ("last", "words"),
    [([], "ended before the answer did"), ([DONE], "ended without a finish reason")],
)
def test_stream_that_ends_without_a_finish_reason_is_raised_by_the_client(last, words):
    with (
        replaying(Recording([], [*TEXT_STREAM.full[:2], *last])) as setup,
        pytest.raises(anthropic.APIError, match=words),
        client(setup).messages.stream(**ASK) as stream,
    ):
        stream.get_final_message()
    assert not setup.trace.spans()[0].status.is_ok


def test_usage_that_is_none_is_left_out():
    recording = streamed(
        [delta(0, ROLE), {**delta(0, {"content": "a"}, [5], "stop"), "usage": 3}], usage(3, 1)
    )
    with replaying(recording) as setup, client(setup).messages.stream(**ASK) as stream:
        assert stream.get_final_message().usage.output_tokens == 1
    assert not setup.trace.spans()[0].status.is_ok


def test_stream_without_done_is_ended():
    assert TEXT_STREAM.full[-1] == DONE
    with (
        replaying(Recording([], TEXT_STREAM.full[:-1])) as setup,
        client(setup).messages.stream(**ASK) as stream,
    ):
        assert stream.get_final_message().stop_reason == "end_turn"


def test_key_may_be_anthropics():
    with replaying(TEXT, token="secret") as setup:
        with pytest.raises(anthropic.AuthenticationError):
            client(setup).messages.create(**ASK)
        allowed = client(setup, api_key="secret")
        assert allowed.messages.create(**ASK).stop_reason == "end_turn"
    assert "secret" not in str(setup.server.headers)


def test_base_url_with_v1_works_too():
    with replaying(whole(chat(choice(0, {"content": "x"}, [5], "stop")))) as setup:
        other = client(setup, base_url=setup.url)
        assert other.messages.create(**ASK).content[0].text == "x"
