"""Attributes that Agent Lightning 0.3's adapters read, where a run asks for them."""

import pytest

from agl_core.llm_proxy.capture import request_attributes, response_attributes

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
REQUEST = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ],
}
ANSWER = {
    "id": "r1",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "message": {"role": "assistant", "content": "two"},
            "finish_reason": "stop",
            "token_ids": [3],
        }
    ],
}
OLD_NAMES = ("gen_ai.prompt.", "gen_ai.completion.", "prompt_token_ids", "response_token_ids")


def recorded():
    attributes = request_attributes(REQUEST) | response_attributes(ANSWER, {})
    return {name: value for name, value in attributes.items() if name.startswith(OLD_NAMES)}


def test_there_are_none_unless_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AGL_FLAT_MESSAGES", raising=False)
    assert recorded() == {}


def test_messages_and_token_ids_have_the_names_of_03(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGL_FLAT_MESSAGES", "1")
    assert recorded() == {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": '[{"type":"text","text":"hi"}]',
        "gen_ai.prompt.1.role": "assistant",
        "gen_ai.prompt.1.tool_calls.0.id": "c1",
        "gen_ai.prompt.1.tool_calls.0.name": "add",
        "gen_ai.prompt.1.tool_calls.0.arguments": '{"a": 1}',
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.tool_call_id": "c1",
        "gen_ai.prompt.2.content": "2",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "two",
        "gen_ai.completion.0.finish_reason": "stop",
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3],
    }


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGL_FLAT_MESSAGES", "maybe")
    with pytest.raises(ValueError, match="AGL_FLAT_MESSAGES must be one of"):
        recorded()
