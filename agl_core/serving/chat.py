"""The chat-completions dialect of the embedded engine: checked requests, OpenAI-shaped answers.

Values only. `prompt_token_ids` are at the top level (of a stream: in its first chunk), `token_ids`
in each choice. Tools are shown to the model by its chat template, and what it writes as a tool call
(`tool_calls`) is one in the answer. Nothing constrains the model to a tool's schema.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agl_core.errors import ConfigError
from agl_core.serving.answers import Answer, JsonObject, TokenText, json_logprob
from agl_core.serving.generation import Completion, SampledToken, ServedPolicy
from agl_core.serving.requests import SamplingFields, TokenIds
from agl_core.serving.tool_calls import ToolCall, ToolCallParser

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


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
    """Of a tool."""

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, value: Any) -> Any:
        """Drop null and empty extras, which clients send when they echo a message of ours."""
        if not isinstance(value, dict):
            return value
        known, absent = cls.model_fields, (None, [])
        return {
            key: item
            for key, item in value.items()
            if item is not None and (key in known or item not in absent)
        }

    @model_validator(mode="after")
    def _check(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only of the assistant")
        if self.role != "tool" and (self.name is not None or self.tool_call_id is not None):
            raise ValueError("name and tool_call_id: only of a tool's message")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: a message without tool_calls needs one")
        return self

    def for_template(self) -> JsonObject:
        """Return the message as chat templates take it: one text, arguments as objects.

        Raises:
            ConfigError: The arguments of a call are not a JSON object.
        """
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message: JsonObject = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        extras = {"tool_call_id": self.tool_call_id, "name": self.name}
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


class TextFormat(BaseModel):
    """The only format of responses."""

    model_config = _STRICT

    type: Literal["text"]


class ChatRequest(SamplingFields):
    """The fields of `POST /v1/chat/completions` that the engine honours."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`; without either, whatever the model has room for."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, min_length=1)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    forced_token_ids: TokenIds | list[TokenIds] | None = None
    """For tests: continue with these ids. A list of lists is a script for a whole conversation: its
    entry i is for the call whose messages have i of the assistant."""

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self

    @property
    def parses_tools(self) -> bool:
        """Whether tool calls are looked for."""
        return self.tools is not None and self.tool_choice != "none"

    def limit(self) -> int | None:
        """Return the most tokens to sample, or None where the request leaves it open."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def template_messages(self) -> list[JsonObject]:
        """Return the messages as a chat template takes them.

        Raises:
            ConfigError: The arguments of an earlier call are not a JSON object.
        """
        return [message.for_template() for message in self.messages]

    def template_tools(self) -> list[JsonObject]:
        """Return the tools as a chat template takes them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    def forced_ids(self) -> list[int] | None:
        """Return the ids to continue with, or None.

        Raises:
            ConfigError: The script has none for this turn.
        """
        script: list[Any] | None = self.forced_token_ids
        if not script or not isinstance(script[0], list):
            return script
        turn = sum(message.role == "assistant" for message in self.messages)
        if turn >= len(script):
            raise ConfigError(f"forced_token_ids: {len(script)} turns, this is turn {turn + 1}")
        return script[turn]


class ChatAnswer(Answer):
    """Builds chat completions."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, request: ChatRequest, prompt_ids: Sequence[int], token_text: TokenText
    ) -> None:
        super().__init__(request, prompt_ids, token_text)
        self._chat = request
        self._parsers = [ToolCallParser() for _ in range(request.n)]

    def whole(self, completions: Sequence[Completion]) -> JsonObject:
        """Return the whole answer."""
        self.num_sampled = sum(len(completion.tokens) for completion in completions)
        answer = self._head(self.kind, completions[0].policy)
        answer["choices"] = [self._choice(*numbered) for numbered in enumerate(completions)]
        answer["usage"] = self._usage()
        if self._chat.return_token_ids:
            answer["prompt_token_ids"] = list(self.prompt_ids)
        return answer

    def first_chunks(self, policy: ServedPolicy) -> list[JsonObject]:
        """Return the chunks that begin each choice; the first one has the prompt's ids."""
        chunks: list[JsonObject] = []
        for index in range(self._chat.n):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append({**self._head(self.chunk_kind, policy), "choices": [choice]})
        if self._chat.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self.prompt_ids)
        return chunks

    def chunk(self, index: int, token: SampledToken) -> JsonObject:
        """Return the chunk of one token."""
        self.num_sampled += 1
        is_last = token.finish_reason is not None
        num_before = self._parsers[index].num_calls
        text, calls = self._parse(index, token.text, is_last)
        delta: JsonObject = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [
                {"index": number, **self._call(index, number, call)}
                for number, call in enumerate(calls, num_before)
            ]
        choice = {"index": index, "delta": delta, **self._end(index, token)}
        choice |= self._recorded([token])
        return {**self._head(self.chunk_kind, token.policy), "choices": [choice]}

    def _choice(self, index: int, completion: Completion) -> JsonObject:
        """Return one entry of `choices`."""
        text, calls = self._parse(index, completion.text, is_last=True)
        message: JsonObject = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = [
                self._call(index, number, call) for number, call in enumerate(calls)
            ]
        choice = {"index": index, "message": message, **self._end(index, completion.tokens[-1])}
        return choice | self._recorded(completion.tokens)

    def _parse(self, index: int, text: str, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Return the text and the tool calls that more text of a choice gives."""
        if not self._chat.parses_tools:
            return text, []
        parser = self._parsers[index]
        found = parser.add(text) + (parser.end() if is_last else [])
        return (
            "".join(part for part in found if isinstance(part, str)),
            [part for part in found if isinstance(part, ToolCall)],
        )

    def _call(self, index: int, number: int, call: ToolCall) -> JsonObject:
        """Return one entry of `tool_calls`; its id is the same where the request is."""
        place = json.dumps([*self.prompt_ids, index, number]).encode()
        return {
            "id": f"call_{hashlib.sha256(place).hexdigest()[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _end(self, index: int, token: SampledToken) -> JsonObject:
        """Return why a choice ended, as its last token says."""
        reason: str | None = token.finish_reason
        if reason == "stop" and self._parsers[index].num_calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": token.stop_reason}

    def _recorded(self, tokens: Sequence[SampledToken]) -> JsonObject:
        """Return log-probs and token ids as far as they were asked for."""
        recorded: JsonObject = {"logprobs": None}
        if self._chat.logprobs:
            recorded["logprobs"] = {"content": [self._logprob(token) for token in tokens]}
        if self._chat.return_token_ids:
            recorded["token_ids"] = [token.token_id for token in tokens]
        return recorded

    def _logprob(self, token: SampledToken) -> JsonObject:
        top = [self._entry(*likely) for likely in token.top_logprobs]
        return {**self._entry(token.token_id, token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> JsonObject:
        text = self.token_text(token_id)
        return {"token": text, "logprob": json_logprob(logprob), "bytes": list(text.encode())}


def _call_for_template(call: EarlierCall) -> JsonObject:
    """Return an earlier call with its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        raise ConfigError(f"messages: arguments of {call.function.name}: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"messages: arguments of {call.function.name} are not a JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
