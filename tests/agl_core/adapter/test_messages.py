import json
from typing import Any

import pytest

from agl_core.adapter.messages import TraceToMessages
from agl_core.types.tracer import Span
from tests.agl_core.adapter.test_chat import CURRENT, FLAT, OPENINFERENCE, OURS, PROMPT, TOOL
from tests.agl_core.adapter.traces import make_llm_span, make_proxy_span, make_reward, make_span

CALL = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def make_chat_span(attributes: dict[str, Any], **given: Any) -> Span:
    return make_span("s", name="call", attributes=attributes, **given)


def test_each_call_is_one_chat_in_the_order_of_starts():
    spans = [make_llm_span("b", 5, 6), make_reward("x", 9, 1.0), make_llm_span("a", 1, 2)]
    assert TraceToMessages().adapt(spans) == [
        {
            "messages": [
                {"role": "user", "content": f"ask {name}"},
                {"role": "assistant", "content": f"answer {name}"},
            ],
            "tools": None,
        }
        for name in "ab"
    ]


@pytest.mark.parametrize("attributes", [FLAT, OPENINFERENCE, CURRENT, OURS])
def test_every_dialect_gives_the_same_messages_and_tools(attributes: dict[str, Any]):
    (chat,) = TraceToMessages().adapt([make_chat_span(attributes)])
    assert chat == {"messages": PROMPT, "tools": [TOOL]}


def test_the_answers_of_our_proxys_spans_come_last():
    (chat,) = TraceToMessages().adapt([make_proxy_span("a", 0, 0, 1)])
    assert chat["messages"] == [
        {"role": "user", "content": "ask a"},
        {"role": "assistant", "content": "yes"},
    ]


def test_tools_that_the_completion_calls_are_kept():
    attributes = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "2+2?",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.finish_reason": "tool_calls",
        "gen_ai.completion.0.tool_calls.0.id": "c2",
        "gen_ai.completion.0.tool_calls.0.type": "function",
        "gen_ai.completion.0.tool_calls.0.name": "add",
        "gen_ai.completion.0.tool_calls.0.arguments": '{"a": 2}',
    }
    (chat,) = TraceToMessages().adapt([make_chat_span(attributes)])
    assert chat["messages"][-1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_child_spans_tell_the_tools_that_a_completion_does_not():
    tool = make_span(
        "t", parent="a",
        attributes={
            "tool.name": "add",
            "tool.parameters": '{"a": 2}',
            "tool.call.id": "c2",
            "tool.call.type": "function",
        },
    )  # fmt: skip
    (chat,) = TraceToMessages().adapt([tool, make_llm_span("a")])
    assert chat["messages"][-1] == {
        "role": "assistant",
        "content": "answer a",
        "tool_calls": [CALL],
    }


def test_an_answer_without_content_is_empty_text():
    (chat,) = TraceToMessages().adapt(
        [make_llm_span("a", attributes={"gen_ai.completion.0.content": None})]
    )
    assert chat["messages"][-1] == {"role": "assistant", "content": ""}


def test_spans_of_agents_and_tools_are_no_chats():
    spans = [
        make_chat_span({"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": "[]"}),
        make_chat_span({"openinference.span.kind": "AGENT", **FLAT}),
    ]
    assert TraceToMessages().adapt(spans) == []


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({"gen_ai.prompt.first": "x"}, "gen_ai.prompt make a dict, not a list"),
        ({"gen_ai.request.0": "x"}, "gen_ai.request make a list, not a dict"),
        ({"gen_ai.response.0": "x"}, "gen_ai.response make a list, not a dict"),
        ({"gen_ai.prompt.0.content": "x"}, "role None"),
        ({"gen_ai.prompt.0.role": "robot", "gen_ai.prompt.0.content": "x"}, "role 'robot'"),
        ({"gen_ai.prompt.0.role": "user"}, "has no content"),
        ({"gen_ai.prompt.0.role": "tool", "gen_ai.prompt.0.content": "x"}, "no tool_call_id"),
        ({"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": 7}, "content is a int"),
        ({"gen_ai.input.messages": json.dumps([{"role": "assistant"}])}, "has no content"),
    ],
)
def test_what_openai_would_refuse_is_an_error(attributes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        TraceToMessages().adapt([make_chat_span(attributes)])
