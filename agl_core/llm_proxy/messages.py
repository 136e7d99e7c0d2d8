"""Anthropic's messages, as chat completions upstream.

    system, text blocks         -> messages of text; several texts are joined by line ends
    tool_use / tool_result      -> tool_calls of the assistant / messages of the role tool
    stop_sequences, max_tokens  -> stop, max_tokens; top_k as it is

Marks for prompt caching, `is_error` of a tool result, and `metadata` have no counterpart and are
left out; any other field or block that is not named here is refused, images too. Arguments of a
tool call that are no JSON object come as `{"INVALID_JSON": text}`, which Anthropic's documentation
suggests, and go back as that text.
"""

from typing import Any

import orjson

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.content import not_text
from agl_core.llm_proxy.dialect import Dialect, StreamWriter
from agl_core.llm_proxy.messages_error import NO_THREADS, refusal_body, upstream_body
from agl_core.llm_proxy.messages_stream import MessagesWriter, token_counts
from agl_core.llm_proxy.refusal import Refusal

INVALID_JSON = "INVALID_JSON"
_PASSED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed")
_WITHOUT_EFFECT = {"metadata", "service_tier", "thinking", "cache_control"}
_TRANSLATED = {"messages", "system", "stop_sequences", "tools", "tool_choice"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessagesDialect(Dialect):
    """`POST /v1/messages`."""

    def ask(self, body: JsonObject) -> JsonObject:
        """Return the request as a chat completion.

        Raises:
            Refusal: It is malformed, or has what chat completions have not.
        """
        if body.get("thread") is not None:
            message = "threads are not kept here; send the whole conversation without `thread`"
            raise Refusal(400, message, NO_THREADS)
        if others := sorted(body.keys() - _TRANSLATED - _WITHOUT_EFFECT - set(_PASSED)):
            raise _refused(f"{', '.join(others)} is not supported")
        if body.get("thinking") not in (None, {"type": "disabled"}):
            raise _refused("thinking is not supported; leave it out or set it to disabled")
        try:
            return _ask(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise _refused(f"the request is not one of messages: {error!r}") from error

    def answer(self, answer: JsonObject, body: JsonObject) -> JsonObject:
        """Return the answer as a message."""
        choice = answer["choices"][0]
        message = choice.get("message") or {}
        calls = message.get("tool_calls") or []
        blocks: list[JsonObject] = []
        if text := message.get("content"):
            blocks.append({"type": "text", "text": text})
        blocks += [_tool_use(call) for call in calls]
        reason, sequence = stop_reason(
            choice.get("finish_reason"), choice.get("stop_reason"), has_calls=bool(calls)
        )
        return {
            "id": f"msg_{answer.get('id')}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": token_counts(answer.get("usage")),
        }

    def writer(self, body: JsonObject) -> StreamWriter:
        """Return what writes a message's events."""
        return MessagesWriter(body.get("model"), self.error, stop_reason)

    def error(self, refusal: Refusal) -> JsonObject:
        """Return an error in Anthropic's shape."""
        return refusal_body(refusal)

    def upstream_error(self, status: int, content: bytes) -> bytes:
        """Return the model server's error in Anthropic's shape."""
        return orjson.dumps(upstream_body(status, content))


def stop_reason(reason: Any, stop: Any, *, has_calls: bool) -> tuple[str | None, str | None]:
    """Return Anthropic's stop reason and stop sequence.

    Args:
        reason: `finish_reason` of the choice.
        stop: vLLM's `stop_reason`: the text of `stop` that was met, the id of a token, or None.
        has_calls: Whether the choice calls tools; with a forced tool, vLLM ends in `stop`.
    """
    if reason != "stop":
        return _STOP_REASONS.get(reason), None
    if has_calls:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return "end_turn", None


def _ask(body: JsonObject) -> JsonObject:
    messages = body["messages"]
    if not isinstance(messages, list):
        raise _refused("the request has no list of messages")
    asked = {name: body[name] for name in _PASSED if body.get(name) is not None}
    asked["messages"] = _system(body.get("system"))
    for message in messages:
        asked["messages"] += _messages(message)
    if body.get("stop_sequences"):
        asked["stop"] = body["stop_sequences"]
    if body.get("tools"):
        asked["tools"] = [_tool(tool) for tool in body["tools"]]
    if choice := body.get("tool_choice"):
        asked["tool_choice"] = _tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            asked["parallel_tool_calls"] = False
    return asked


def _system(system: Any) -> list[JsonObject]:
    return [{"role": "system", "content": _text(system)}] if system else []


def _messages(message: JsonObject) -> list[JsonObject]:
    """Return a message as chat completions have it; tool results become messages of their own."""
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant", "system"):
        raise _refused(f"a message has the role {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_assistant(content)]
    messages: list[JsonObject] = []
    texts: list[str] = []
    for block in content:
        if block["type"] == "tool_result":
            messages += _with_texts(role, texts)
            texts = []
            result = _text(block.get("content") or "")
            messages.append(
                {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
            )
        elif block["type"] == "text":
            texts.append(block["text"])
        else:
            raise not_text(block["type"])
    return messages + _with_texts(role, texts)


def _with_texts(role: str, texts: list[str]) -> list[JsonObject]:
    return [{"role": role, "content": "\n".join(texts)}] if texts else []


def _assistant(blocks: list[JsonObject]) -> JsonObject:
    texts: list[str] = []
    calls: list[JsonObject] = []
    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": _arguments(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            raise _refused(f"an assistant's message has a block of the type {block['type']!r}")
    message: JsonObject = {"role": "assistant", "content": "\n".join(texts) or None}
    return {**message, "tool_calls": calls} if calls else {**message, "content": "\n".join(texts)}


def _arguments(tool_input: Any) -> str:
    if isinstance(tool_input, dict) and tool_input.keys() == {INVALID_JSON}:
        return str(tool_input[INVALID_JSON])
    return orjson.dumps(tool_input).decode()


def _tool(tool: JsonObject) -> JsonObject:
    if tool.get("type", "custom") not in ("custom", None):
        raise _refused(f"tools of the type {tool['type']!r} run at Anthropic only")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: JsonObject) -> Any:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice["type"] not in _TOOL_CHOICES:
        raise _refused(f"tool_choice {choice['type']!r} is not supported")
    return _TOOL_CHOICES[choice["type"]]


def _tool_use(call: JsonObject) -> JsonObject:
    function = call["function"]
    try:
        tool_input = orjson.loads(function.get("arguments") or "{}")
    except orjson.JSONDecodeError:
        tool_input = None
    if not isinstance(tool_input, dict):
        tool_input = {INVALID_JSON: function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": tool_input}


def _text(content: Any) -> str:
    """Return text, or the texts of blocks."""
    if isinstance(content, str):
        return content
    for block in content:
        if block["type"] != "text":
            raise not_text(block["type"])
    return "\n".join(block["text"] for block in content)


def _refused(message: str) -> Refusal:
    return Refusal(400, message, "unsupported")
