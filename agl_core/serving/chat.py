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
from agl_core.serving.conversation import Conversation
from agl_core.serving.generation import Completion, SampledToken, ServedPolicy
from agl_core.serving.requests import SamplingFields, TokenIds
from agl_core.serving.tool_calls import ToolCall, ToolCallParser

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextFormat(BaseModel):
    """The only format of responses."""

    model_config = _STRICT

    type: Literal["text"]


class ChatRequest(Conversation, SamplingFields):
    """The fields of `POST /v1/chat/completions` that the engine honours."""

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`; without either, whatever the model has room for."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    """False only without tools: nothing keeps a model from calling two."""
    response_format: TextFormat | None = None
    forced_token_ids: TokenIds | list[TokenIds] | None = None
    """For tests: continue with these ids. A list of lists is a script for a whole conversation: its
    entry i is for the call whose messages have i of the assistant."""

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ")
        if self.parallel_tool_calls is False and self.parses_tools:
            raise ValueError("parallel_tool_calls: false is not supported with tools")
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
