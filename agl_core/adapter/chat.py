"""The chat of one model call as OpenAI's messages, whatever wrote it into span attributes.

Understood: current `gen_ai.*` (messages as JSON, in parts, or in OpenAI's form as our proxy writes
them), the older flat `gen_ai.prompt.N.*` and `gen_ai.completion.N.*` (AgentOps, LiteLLM,
OpenLLMetry), and OpenInference's `llm.input_messages.N.message.*`. What is not recorded, or cannot
be read, is empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from agl_core import semconv
from agl_core.adapter.attributes import as_dict, as_list, parse_json, unflatten
from agl_core.tracer.attributes import safe_str

ChatMessage = dict[str, Any]
"""One of OpenAI's messages: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`,
`name`, `finish_reason`."""

SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
FLAT_PROMPT, FLAT_COMPLETION = "gen_ai.prompt", "gen_ai.completion"
FLAT_FUNCTIONS = ("gen_ai.request.functions", "llm.request.functions")
OPENINFERENCE_INPUT, OPENINFERENCE_OUTPUT = "llm.input_messages", "llm.output_messages"
OPENINFERENCE_TOOLS = "llm.tools"


@dataclass(frozen=True, slots=True)
class Chat:
    """What was said in one model call."""

    prompt: list[ChatMessage]
    completions: list[ChatMessage]
    """One for each choice."""
    tools: list[dict[str, Any]]
    """Function tools that the model could call, in OpenAI's form."""


def read_chat(attributes: Mapping[str, Any]) -> Chat:
    """Return the chat that a span's attributes hold."""
    instructions = _system_message(attributes.get(SYSTEM_INSTRUCTIONS))
    return Chat(
        prompt=instructions
        + _read_messages(attributes, semconv.INPUT_MESSAGES, FLAT_PROMPT, OPENINFERENCE_INPUT),
        completions=_read_messages(
            attributes, semconv.OUTPUT_MESSAGES, FLAT_COMPLETION, OPENINFERENCE_OUTPUT
        ),
        tools=_read_tools(attributes),
    )


def find_image_urls(messages: list[ChatMessage]) -> list[str]:
    """Return the URLs of the images in messages, in order."""
    urls: list[str] = []
    for message in messages:
        for part in as_list(message.get("content")):
            image = part.get("image_url") if isinstance(part, Mapping) else None
            url = image.get("url") if isinstance(image, Mapping) else image
            if isinstance(url, str):
                urls.append(url)
    return urls


def to_tool_call(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, from one with or without a nested `function`."""
    function = as_dict(recorded.get("function")) or recorded
    return {
        "id": recorded.get("id"),
        "type": recorded.get("type") or "function",
        "function": {
            "name": function.get("name"),
            "arguments": _as_text(function.get("arguments"), missing="{}"),
        },
    }


def to_tool(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function tool in OpenAI's form; parameters in JSON are decoded."""
    function = as_dict(recorded.get("function")) or dict(recorded)
    kept = {name: function[name] for name in ("name", "description") if function.get(name)}
    parameters = parse_json(function.get("parameters"))
    if parameters is not None:
        kept["parameters"] = parameters
    return {"type": "function", "function": kept}


def _read_messages(
    attributes: Mapping[str, Any], current: str, flat: str, openinference: str
) -> list[ChatMessage]:
    recorded = as_list(parse_json(attributes.get(current)))
    if recorded:
        return [message for entry in recorded for message in _from_parts(as_dict(entry))]
    recorded = as_list(unflatten(attributes, flat))
    if recorded:
        return [_from_flat(as_dict(entry)) for entry in recorded]
    recorded = as_list(unflatten(attributes, openinference))
    return [_from_openinference(as_dict(as_dict(entry).get("message"))) for entry in recorded]


def _from_parts(message: ChatMessage) -> list[ChatMessage]:
    """Return a message with `parts` as OpenAI's; each tool's answer becomes one of its own."""
    if "parts" not in message:
        return [message]
    content: list[dict[str, Any]] = []
    tool_calls: list[dict[str, Any]] = []
    answers: list[ChatMessage] = []
    for part in map(as_dict, as_list(message["parts"])):
        if part.get("type") == "tool_call":
            tool_calls.append(to_tool_call({**part, "type": "function"}))
        elif part.get("type") == "tool_call_response":
            answer = part.get("response", part.get("result"))
            answers.append(
                {"role": "tool", "tool_call_id": part.get("id"), "content": _as_text(answer)}
            )
        elif part.get("type") != "reasoning":
            content.append(_content_part(part))
    rest = {name: value for name, value in message.items() if name != "parts"}
    if answers and not content and not tool_calls:
        return answers
    spoken = {**rest, "content": _joined(content) if content else None}
    if tool_calls:
        spoken["tool_calls"] = tool_calls
    return [spoken, *answers]


def _content_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return one of the current parts in OpenAI's form; one of unknown type as it is."""
    if part.get("type") == "text":
        return {"type": "text", "text": _as_text(part.get("content"))}
    if part.get("modality") == "image" and isinstance(part.get("uri"), str):
        return {"type": "image_url", "image_url": {"url": part["uri"]}}
    if part.get("modality") == "image" and part.get("type") == "blob":
        url = f"data:{part.get('mime_type')};base64,{part.get('content')}"
        return {"type": "image_url", "image_url": {"url": url}}
    return part


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as one text where all are text."""
    if all(part.get("type") == "text" for part in parts):
        return "".join(_as_text(part.get("text")) for part in parts)
    return parts


def _from_flat(recorded: dict[str, Any]) -> ChatMessage:
    message = {**recorded, "content": _flat_content(recorded.get("content"))}
    if "tool_calls" in recorded:
        message["tool_calls"] = [
            to_tool_call(as_dict(call)) for call in as_list(recorded["tool_calls"])
        ]
    return message


def _flat_content(content: Any) -> Any:
    """Return content as it is, unless it is JSON of a list of parts (images, say)."""
    if isinstance(content, str) and content.startswith("[{"):
        parts = parse_json(content)
        if parts and all(isinstance(part, dict) and "type" in part for part in parts):
            return parts
    return content


def _from_openinference(recorded: dict[str, Any]) -> ChatMessage:
    message = {
        name: recorded[name] for name in ("role", "name", "tool_call_id") if name in recorded
    }
    parts = [
        as_dict(as_dict(part).get("message_content")) for part in as_list(recorded.get("contents"))
    ]
    message["content"] = _joined([_image_part(part) for part in parts]) if parts else None
    if "content" in recorded:
        message["content"] = recorded["content"]
    calls = [
        as_dict(as_dict(call).get("tool_call")) for call in as_list(recorded.get("tool_calls"))
    ]
    if calls:
        message["tool_calls"] = [to_tool_call(call) for call in calls]
    return message


def _image_part(part: dict[str, Any]) -> dict[str, Any]:
    url = as_dict(as_dict(part.get("image")).get("image")).get("url")
    return {"type": "image_url", "image_url": {"url": url}} if url else part


def _system_message(recorded: Any) -> list[ChatMessage]:
    parts = as_list(parse_json(recorded))
    return _from_parts({"role": "system", "parts": parts}) if parts else []


def _read_tools(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    recorded = as_list(parse_json(attributes.get(TOOL_DEFINITIONS)))
    for prefix in FLAT_FUNCTIONS:
        recorded = recorded or as_list(unflatten(attributes, prefix))
    if not recorded:
        recorded = [
            parse_json(as_dict(as_dict(entry).get("tool")).get("json_schema"))
            for entry in as_list(unflatten(attributes, OPENINFERENCE_TOOLS))
        ]
    return [to_tool(tool) for tool in map(as_dict, recorded) if tool]


def _as_text(value: Any, missing: str = "") -> str:
    """Return text as it is, and any other value as JSON."""
    if value is None:
        return missing
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=safe_str).decode()
    except TypeError:  # an integer beyond 64 bits, text that is no Unicode, or too deep
        return safe_str(value)
