"""What answers of the embedded engine have in common: identity, usage, errors, server-sent events.

Token ids follow vLLM's dialect (`return_token_ids`). The chunks of a stream, put together, are the
answer that the same request gets without a stream.
"""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from agl_core.serving.generation import Completion, SampledToken, ServedPolicy
from agl_core.serving.requests import SamplingFields

JsonObject = dict[str, Any]
TokenText = Callable[[int], str]
"""Returns the text of one token id, special tokens included."""

DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0
"""Stands for a probability of 0, which JSON cannot say as a log-prob; vLLM's number."""


class Answer(ABC):
    """Builds the answer to one request, whole or in chunks.

    Args:
        request: What was asked for.
        prompt_ids: [prompt_length] ids that the model saw.
        token_text: Text of one token.
    """

    kind: ClassVar[str]
    """`object` of the whole answer."""
    chunk_kind: ClassVar[str]
    """`object` of a chunk."""
    id_prefix: ClassVar[str]

    def __init__(
        self, request: SamplingFields, prompt_ids: Sequence[int], token_text: TokenText
    ) -> None:
        self.prompt_ids = prompt_ids
        self.num_sampled = 0
        """Tokens of all choices so far."""
        self.token_text = token_text
        self._request = request
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    @abstractmethod
    def whole(self, completions: Sequence[Completion]) -> JsonObject:
        """Return the whole answer; completions [n] are of one policy."""

    @abstractmethod
    def first_chunks(self, policy: ServedPolicy) -> list[JsonObject]:
        """Return the chunks that come before any token."""

    @abstractmethod
    def chunk(self, index: int, token: SampledToken) -> JsonObject:
        """Return the chunk of one token of one choice; all tokens must come, in order."""

    def last_chunks(self, policy: ServedPolicy) -> list[JsonObject]:
        """Return the chunks that come after all tokens."""
        if not self._request.streams_usage:
            return []
        return [{**self._head(self.chunk_kind, policy), "choices": [], "usage": self._usage()}]

    def _head(self, kind: str, policy: ServedPolicy) -> JsonObject:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": policy.version,
            "system_fingerprint": policy.weights_digest,
        }

    def _usage(self) -> dict[str, int]:
        num_prompt = len(self.prompt_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_sampled,
            "total_tokens": num_prompt + self.num_sampled,
        }


def json_logprob(logprob: float) -> float:
    """Return a log-prob that JSON can hold."""
    return max(logprob, _MIN_LOGPROB)


def event(data: JsonObject) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def error_answer(message: str, kind: str, code: str) -> JsonObject:
    """Return an error's body in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
