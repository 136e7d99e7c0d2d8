"""The chat-completions dialect of the embedded engine: checked requests, OpenAI-shaped answers.

Values only. Token ids follow vLLM's dialect: `prompt_token_ids` at the top level, `token_ids` in
each choice. A field that the engine does not honour is an error, never ignored.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agl_core.errors import ConfigError
from agl_core.serving.generation import MAX_SEED, MIN_SEED, Completion

Role = Literal["system", "developer", "user", "assistant", "tool"]
TokenText = Callable[[int], str]
"""Returns the text of one token id, special tokens included."""


class ChatMessage(BaseModel):
    """One message of plain text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Role
    content: str

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, value: Any) -> Any:
        """Drop null and empty extras, which clients send when they echo a message of ours."""
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        absent = (None, [])
        return {key: item for key, item in value.items() if key in known or item not in absent}


class ChatRequest(BaseModel):
    """The fields of `POST /v1/chat/completions` that the engine honours.

    Raises:
        ValidationError: A field is unknown, not supported with that value, or contradicts another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`; without either, whatever the model has room for."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    n: int = Field(default=1, ge=1, le=1024)
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None
    return_token_ids: bool = False
    stop: list[str] = Field(default=[], max_length=16)
    top_p: Literal[1] | None = None
    top_k: Literal[-1, 0] | None = None
    stream: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, value: Any) -> Any:
        """Read a null as an absent field, and one stop text as a list of one.

        A stream is refused first: it brings fields that would hide the reason.
        """
        if not isinstance(value, dict):
            return value
        fields = {key: item for key, item in value.items() if item is not None}
        if fields.get("stream"):
            raise ValueError("stream: the embedded engine does not stream; send it without stream")
        if isinstance(fields.get("stop"), str):
            fields["stop"] = [fields["stop"]]
        return fields

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ")
        if "" in self.stop:
            raise ValueError("stop: an empty text would end every response")
        return self

    def limit(self) -> int | None:
        """Return the most tokens to sample, or None where the request leaves it open."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def template_messages(self) -> list[dict[str, str]]:
        """Return the messages as a chat template takes them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


def parse_request(body: bytes) -> ChatRequest:
    """Return the checked request.

    Raises:
        ConfigError: The body is not JSON, or a field is unknown or not supported and then named.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise ConfigError(describe(error)) from error


def describe(error: ValidationError) -> str:
    """Return each problem as `field: reason`."""
    problems: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in problem["loc"])
        reason = problem["msg"]
        if problem["type"] == "extra_forbidden":
            reason = "this field is not supported"
        problems.append(f"{field}: {reason}" if field else reason)
    return "; ".join(problems)


def chat_answer(
    request: ChatRequest,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    token_text: TokenText,
) -> dict[str, Any]:
    """Return the body of the answer.

    Args:
        request: What was asked for.
        prompt_ids: [prompt_length] ids that the model saw.
        completions: [n] responses of one policy.
        token_text: Text of one token, for `logprobs.content[].token`.
    """
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    policy = completions[0].policy
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": policy.version,
        "system_fingerprint": policy.weights_digest,
        "choices": [
            _choice(index, request, completion, token_text)
            for index, completion in enumerate(completions)
        ],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": completion_tokens,
            "total_tokens": len(prompt_ids) + completion_tokens,
        },
    }
    if request.return_token_ids:
        answer["prompt_token_ids"] = list(prompt_ids)
    return answer


def _choice(
    index: int, request: ChatRequest, completion: Completion, token_text: TokenText
) -> dict[str, Any]:
    """Return one entry of `choices`."""
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": completion.text},
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    if request.logprobs:
        content: list[dict[str, Any]] = []
        for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            token = token_text(token_id)
            entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
            content.append({**entry, "top_logprobs": []})
        choice["logprobs"] = {"content": content}
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def error_answer(message: str, kind: str, code: str) -> dict[str, Any]:
    """Return an error's body in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
