"""OpenAI's responses through the proxy."""

from typing import Any

import openai
import pytest

from agl_core import semconv
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.responses import ResponsesDialect
from agl_core.llm_proxy.responses_items import finished
from tests.agl_core.llm_proxy.replay import (
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
)

ASK = {"model": "m", "input": "hi"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def ask(**body):
    return ResponsesDialect().ask({**ASK, **body})


def test_answer_is_a_response_and_recorded_as_a_chat_completion():
    with replaying(TEXT) as setup:
        response = setup.openai().responses.create(
            **ASK, instructions="be brief", max_output_tokens=20, temperature=0.5
        )
        span = setup.last_call()
    assert response.output_text == "a\u00e9c"
    assert (response.id, response.status, response.model) == ("resp_c-1", "completed", "m")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (3, 3)
    assert (response.temperature, response.instructions) == (0.5, "be brief")
    asked = setup.server.requests[0]
    assert asked["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert (asked["max_tokens"], asked["return_token_ids"]) == (20, True)
    assert span.status.is_ok
    assert span.attributes[semconv.RESPONSE_TOKEN_IDS] == (5, 6, 7)


def test_text_after_a_function_call_is_an_item_of_its_own():
    chunks = [
        delta(0, ROLE),
        delta(0, {"content": "before"}, [5]),
        delta(0, call_delta(0, "{}", id="t-1", name="add"), [6]),
        delta(0, {"content": "after"}, [7], "tool_calls"),
    ]
    with replaying(streamed(chunks, usage(3, 3))) as setup:
        with setup.openai().responses.stream(**ASK, tools=[TOOL]) as stream:
            response = stream.get_final_response()
        assert setup.last_call().status.is_ok
    first, call, last = response.output
    assert (first.content[0].text, call.name, last.content[0].text) == ("before", "add", "after")
    assert len({first.id, call.id, last.id}) == 3


def test_tool_calls_are_function_calls():
    with replaying(TOOLS) as setup:
        response = setup.openai().responses.create(
            **ASK, tools=[TOOL], tool_choice={"type": "function", "name": "add"}
        )
    assert [(item.type, item.call_id, item.name, item.arguments) for item in response.output] == [
        ("function_call", "t-1", "add", '{"a": 1}'),
        ("function_call", "t-2", "sub", '{"b": 2}'),
    ]
    asked = setup.server.requests[0]
    function = {"name": "add", "parameters": {"type": "object"}}  # no grammar binds the policy
    assert asked["tools"] == [{"type": "function", "function": function}]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("recording", "plain"), [(TEXT_STREAM, TEXT), (TOOLS_STREAM, TOOLS)], ids=["text", "tools"]
)
def test_streamed_response_is_the_same_as_the_whole_one(recording, plain):
    with replaying(plain) as setup:
        expected = setup.openai().responses.create(**ASK).to_dict()
        first = setup.last_call().attributes
    with replaying(recording) as setup:
        with setup.openai().responses.stream(**ASK) as stream:
            events = list(stream)
            response = stream.get_final_response().to_dict()
        raw = list(setup.openai().responses.create(**ASK, stream=True))
        span = setup.last_call()
    expected["created_at"] = response["created_at"]
    for found in (expected, response):  # the helper adds what it parsed
        for item in found["output"]:
            item.pop("parsed_arguments", None)
            for part in item.get("content", ()):
                part.pop("parsed", None)
    assert response == expected
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert span.status.is_ok
    for name in (semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS, semconv.LOGPROBS):
        assert span.attributes[name] == first[name]


def test_output_of_a_response_can_be_sent_back():
    with replaying(TOOLS) as setup:
        response = setup.openai().responses.create(**ASK)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
            for item in response.output
        ]
        conversation = [{"role": "user", "content": "hi"}, *response.output, *outputs]
        setup.openai().responses.create(model="m", input=conversation)
        messages = setup.server.requests[1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["t-1", "t-2"]
    assert messages[2] == {"role": "tool", "tool_call_id": "t-1", "content": "3"}


def test_items_of_text_and_developers():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answered = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "so", "annotations": []}],
    }
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts},
        answered,
    ]
    assert ask(input=items)["messages"] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "so"},
    ]


def test_format_of_the_text():
    schema = {"type": "json_schema", "name": "n", "schema": {}, "strict": True}
    asked = ask(text={"format": schema})
    assert asked["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {}, "strict": True},
    }
    assert "response_format" not in ask(text={"format": {"type": "text"}})


def test_cut_off_answer_is_incomplete():
    answer = chat(choice(0, {"content": "x"}, [5], "length"))
    response = ResponsesDialect().answer(answer, ASK)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"previous_response_id": "resp_1"}, "responses are not stored"),
        ({"conversation": "c"}, "conversations are not stored"),
        ({"background": True}, "background=True"),
        ({"truncation": "auto"}, "truncation='auto'"),
        ({"include": ["message.output_text.logprobs"]}, "include="),
        ({"max_tool_calls": 3}, "max_tool_calls is not supported"),
        ({"tools": [{"type": "web_search"}]}, "run at OpenAI only"),
        ({"tool_choice": {"type": "web_search"}}, "'web_search'"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "'reasoning'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file'"),
        ({"input": None}, "not one of responses"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
    ],
)
def test_what_chat_completions_have_not_is_refused(body, words):
    with pytest.raises(Refusal, match=words) as caught:
        ask(**body)
    assert caught.value.status == 400


def test_errors_are_raised_by_the_client():
    with replaying(TEXT) as setup, pytest.raises(openai.BadRequestError, match="not stored"):
        setup.openai().responses.create(**ASK, previous_response_id="resp_1")
    cut = Recording([], [*TEXT_STREAM.full[:2], event({"error": {"message": "out of memory"}})])
    with (
        replaying(cut) as setup,
        pytest.raises(openai.APIError, match="out of memory"),
    ):
        list(setup.openai().responses.create(**ASK, stream=True))
    assert not setup.trace.spans()[0].status.is_ok


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("abort", "incomplete", None),
    ],
)
def test_an_answer_that_was_cut_is_not_completed(reason: str, status: str, details: Any):
    response = finished({}, [], reason, None)
    assert (response["status"], response["incomplete_details"]) == (status, details)
