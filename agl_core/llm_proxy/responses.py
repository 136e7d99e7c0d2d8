"""OpenAI's responses, as chat completions upstream; function tools only.

    instructions, input         -> messages; a developer is the system
    function_call(_output)      -> tool_calls of the assistant / messages of the role tool
    text.format                 -> response_format
    max_output_tokens           -> max_tokens

Nothing is stored: `previous_response_id` and `conversation` are refused, an agent sends the whole
input; `store` is accepted, and the answer says `false`. Names for caching and abuse detection are
left out; any other field or item that is not named here is refused.
"""

from typing import Any

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.content import not_text
from agl_core.llm_proxy.dialect import Dialect, StreamWriter
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.responses_items import call_item, finished, message_item, response_head
from agl_core.llm_proxy.responses_stream import ResponsesWriter

_PASSED = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "seed",
        "stream",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "parallel_tool_calls",
        "user",
    }
)
_TRANSLATED = frozenset(
    {"input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"}
)
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "stream_options",
    }
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),  # no reasoning is given, so none of it either
    "top_logprobs": (0,),
}
"""Fields that may be sent with these values only."""
_REFUSED = {
    "previous_response_id": "responses are not stored; send the whole input",
    "conversation": "conversations are not stored; send the whole input",
}


class ResponsesDialect(Dialect):
    """`POST /v1/responses`."""

    def ask(self, body: JsonObject) -> JsonObject:
        """Return the request as a chat completion.

        Raises:
            Refusal: It is malformed, or has what chat completions have not.
        """
        body = {name: value for name, value in body.items() if value is not None}
        for name, reason in _REFUSED.items():
            if name in body:
                raise _refused(f"{name} is not supported: {reason}")
        for name, values in _ONLY.items():
            if name in body and body[name] not in values:
                raise _refused(f"{name}={body[name]!r} is not supported")
        known = _PASSED | _TRANSLATED | _WITHOUT_EFFECT | _ONLY.keys()
        if others := sorted(body.keys() - known):
            raise _refused(f"{', '.join(others)} is not supported")
        try:
            return _ask(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise _refused(f"the request is not one of responses: {error!r}") from error

    def answer(self, answer: JsonObject, body: JsonObject) -> JsonObject:
        """Return the answer as a response."""
        choice = answer["choices"][0]
        message = choice.get("message") or {}
        output: list[JsonObject] = []
        if text := message.get("content"):
            output.append(message_item(f"msg_{answer.get('id')}_0", text))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            output.append(call_item(call["id"], function["name"], function.get("arguments") or ""))
        head = response_head(answer.get("id"), body)
        return finished(head, output, choice.get("finish_reason"), answer.get("usage"))

    def writer(self, body: JsonObject) -> StreamWriter:
        """Return what writes a response's events."""
        return ResponsesWriter(body)


def _ask(body: JsonObject) -> JsonObject:
    asked = {name: value for name, value in body.items() if name in _PASSED}
    messages: list[JsonObject] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items:
        _add_item(messages, item)
    asked["messages"] = messages
    if "max_output_tokens" in body:
        asked["max_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        asked["tools"] = [_tool(tool) for tool in body["tools"]]
    if choice := body.get("tool_choice"):
        asked["tool_choice"] = _tool_choice(choice)
    asked.update(_text_format(body.get("text") or {}))
    reasoning = {k: v for k, v in (body.get("reasoning") or {}).items() if v is not None}
    if others := sorted(reasoning.keys() - {"effort"}):
        raise _refused(f"reasoning.{others[0]} is not supported")
    if reasoning:
        asked["reasoning_effort"] = reasoning["effort"]
    return asked


def _add_item(messages: list[JsonObject], item: JsonObject) -> None:
    """Add an item of the input; function calls join the assistant's message before them."""
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": _content(item["content"])})
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    else:
        raise _refused(f"an item of the input has the type {kind!r}")


def _content(content: Any) -> str:
    """Return text, or the texts of parts."""
    return content if isinstance(content, str) else "\n".join(map(_part, content))


def _part(part: JsonObject) -> str:
    if part["type"] in ("input_text", "output_text", "text"):
        return part["text"]
    if part["type"] == "refusal":
        return part["refusal"]
    raise not_text(part["type"])


def _tool(tool: JsonObject) -> JsonObject:
    if tool["type"] != "function":
        raise _refused(f"tools of the type {tool['type']!r} run at OpenAI only")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if choice["type"] != "function":
        raise _refused(f"tool_choice of the type {choice['type']!r} is not supported")
    return {"type": "function", "function": {"name": choice["name"]}}


def _text_format(text: JsonObject) -> JsonObject:
    if text.get("verbosity") is not None:
        raise _refused("text.verbosity is not supported")
    found = text.get("format") or {"type": "text"}
    if found["type"] == "text":
        return {}
    if found["type"] == "json_schema":
        schema = {name: value for name, value in found.items() if name != "type"}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"response_format": found}


def _refused(message: str) -> Refusal:
    return Refusal(400, message, "unsupported")
