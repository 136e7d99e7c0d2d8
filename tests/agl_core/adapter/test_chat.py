import json
from typing import Any

import pytest

from agl_core.adapter.chat import find_image_urls, read_chat

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": SCHEMA},
}
PROMPT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]

FLAT = {
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "be brief",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "1+1?",
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "c1",
    "gen_ai.prompt.2.tool_calls.0.name": "add",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"a": 1}',
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.tool_call_id": "c1",
    "gen_ai.prompt.3.content": "2",
    "gen_ai.request.functions.0.name": "add",
    "gen_ai.request.functions.0.description": "adds",
    "gen_ai.request.functions.0.parameters": json.dumps(SCHEMA),
}
OPENLLMETRY = {
    name.replace("gen_ai.request.functions", "llm.request.functions"): value
    for name, value in FLAT.items()
}
OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "be brief",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "1+1?",
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "add",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"a": 1}',
    "llm.input_messages.3.message.role": "tool",
    "llm.input_messages.3.message.tool_call_id": "c1",
    "llm.input_messages.3.message.content": "2",
    "llm.tools.0.tool.json_schema": json.dumps(TOOL),
}
CURRENT = {
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "be brief"}]),
    "gen_ai.input.messages": json.dumps(
        [
            {"role": "user", "parts": [{"type": "text", "content": "1+1?"}]},
            {
                "role": "assistant",
                "parts": [
                    {"type": "reasoning", "content": "hm"},
                    {"type": "tool_call", "id": "c1", "name": "add", "arguments": '{"a": 1}'},
                ],
            },
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": 2}]},
        ]
    ),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", **TOOL["function"]}]),
}
OURS = {"gen_ai.input.messages": json.dumps(PROMPT), "gen_ai.tool.definitions": json.dumps([TOOL])}


@pytest.mark.parametrize("attributes", [FLAT, OPENLLMETRY, OPENINFERENCE, CURRENT, OURS])
def test_every_dialect_tells_the_same_chat_with_tools(attributes: dict[str, Any]):
    chat = read_chat(attributes)
    assert chat.prompt == PROMPT
    assert chat.tools == [TOOL]
    assert chat.completions == []


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": json.dumps(
                [
                    {"type": "text", "text": "what?"},
                    {"type": "image_url", "image_url": {"url": "http://x/i.png"}},
                ]
            ),
        },
        {
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.contents.0.message_content.type": "text",
            "llm.input_messages.0.message.contents.0.message_content.text": "what?",
            "llm.input_messages.0.message.contents.1.message_content.type": "image",
            "llm.input_messages.0.message.contents.1.message_content.image.image.url": (
                "http://x/i.png"
            ),
        },
        {
            "gen_ai.input.messages": json.dumps(
                [
                    {
                        "role": "user",
                        "parts": [
                            {"type": "text", "content": "what?"},
                            {"type": "uri", "modality": "image", "uri": "http://x/i.png"},
                        ],
                    }
                ]
            )
        },
    ],
)
def test_images_are_found(attributes: dict[str, Any]):
    chat = read_chat(attributes)
    assert find_image_urls(chat.prompt) == ["http://x/i.png"]
    assert chat.prompt[0]["content"][0] == {"type": "text", "text": "what?"}


def test_an_image_in_the_message_becomes_a_data_url():
    part = {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAAA"}
    messages = [{"role": "user", "parts": [part]}]
    chat = read_chat({"gen_ai.input.messages": json.dumps(messages)})
    assert find_image_urls(chat.prompt) == ["data:image/png;base64,AAAA"]


def test_text_that_looks_like_parts_but_is_not_stays_text():
    attributes = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": '[{"a": 1}]'}
    assert read_chat(attributes).prompt[0]["content"] == '[{"a": 1}]'


def test_nothing_recorded_is_an_empty_chat():
    chat = read_chat({"gen_ai.input.messages": "broken", "gen_ai.prompt": "old"})
    assert (chat.prompt, chat.completions, chat.tools) == ([], [], [])
