"""A conversation as OpenAI's clients send it, and as chat templates take it. Values only."""

import json
from collections.abc import Collection
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agl_core.errors import ConfigError
from agl_core.serving.answers import JsonObject

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_NOT_SHOWN = frozenset({"annotations", "cache_control"})
"""Fields of messages, their parts and tools that no chat template shows to the model."""


def _without_absent(value: Any, known: Collection[str]) -> Any:
    """Drop what says nothing: nulls, empty extras, and what no template shows."""
    if not isinstance(value, dict):
        return value
    return {
        key: item
        for key, item in value.items()
        if item is not None and key not in _NOT_SHOWN and (key in known or item != [])
    }


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = _STRICT

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """Read a refusal, which clients echo, as the text that it is."""
        if isinstance(value, dict) and value.get("type") == "refusal":
            value = {"type": "text", "text": value.get("refusal")}
        return _without_absent(value, cls.model_fields)


class CalledFunction(BaseModel):
    """What an earlier turn called."""

    model_config = _STRICT

    name: str
    arguments: str
    """A JSON object."""
    parsed_arguments: Any = None
    """The same, which OpenAI's client adds where it read a stream; not read."""


class EarlierCall(BaseModel):
    """A tool call of an earlier turn."""

    model_config = _STRICT

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Its place in the stream that it came in; not read."""


class ChatMessage(BaseModel):
    """One message."""

    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierCall] = []
    """Of the assistant."""
    tool_call_id: str | None = None
    """Which call a tool's message answers."""
    name: str | None = None
    """Of a tool, or of who speaks; the chat template may show it."""
    refusal: str | None = None
    """What the assistant refused with, instead of its content."""
    reasoning_content: str | None = None
    """What the assistant thought before its content; the chat template may show it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, value: Any) -> Any:
        """Drop what clients send with every message, or when they echo one of ours."""
        return _without_absent(value, cls.model_fields)

    @model_validator(mode="after")
    def _check(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only of the assistant")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id: only of a tool's message")
        if self.role != "assistant" and (self.refusal or self.reasoning_content):
            raise ValueError("refusal and reasoning_content: only of the assistant")
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError("content: a message without tool_calls needs one")
        return self

    def for_template(self) -> JsonObject:
        """Return the message as chat templates take it: one text, arguments as objects.

        Raises:
            ConfigError: The arguments of a call are not a JSON object.
        """
        content = self.content or self.refusal or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message: JsonObject = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        extras = {
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "reasoning_content": self.reasoning_content,
        }
        return message | {name: text for name, text in extras.items() if text is not None}


class Function(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may use."""

    model_config = _STRICT

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, value: Any) -> Any:
        return _without_absent(value, cls.model_fields)


class Conversation(BaseModel):
    """What a chat template makes a prompt of."""

    model_config = _STRICT

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = Field(default=None, min_length=1)

    def template_messages(self) -> list[JsonObject]:
        """Return the messages as a chat template takes them.

        Raises:
            ConfigError: The arguments of an earlier call are not a JSON object.
        """
        return [message.for_template() for message in self.messages]

    def template_tools(self) -> list[JsonObject]:
        """Return the tools as a chat template takes them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]


class TokenizeRequest(Conversation):
    """The fields of `POST /tokenize` that the engine honours."""

    model: str


def _call_for_template(call: EarlierCall) -> JsonObject:
    """Return an earlier call with its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"messages: arguments of {call.function.name}: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"messages: arguments of {call.function.name} are not a JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
