"""The completions dialect of the embedded engine: a text, or token ids, continued.

Values only. As in vLLM, `prompt_token_ids` and `token_ids` are in each choice (of a stream: the
former in its first chunk).
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from agl_core.serving.answers import Answer, JsonObject, TokenText, json_logprob
from agl_core.serving.generation import Completion, SampledToken, ServedPolicy
from agl_core.serving.requests import SamplingFields, TokenIds


class CompletionRequest(SamplingFields):
    """The fields of `POST /v1/completions` that the engine honours."""

    prompt: str | TokenIds
    """One text, or [prompt_length] ids; several prompts are several requests."""
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many likeliest tokens to list besides the sampled one."""
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    forced_token_ids: TokenIds | None = None
    """For tests: continue with these ids."""


class CompletionAnswer(Answer):
    """Builds completions."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(
        self, request: CompletionRequest, prompt_ids: Sequence[int], token_text: TokenText
    ) -> None:
        super().__init__(request, prompt_ids, token_text)
        self._completion = request
        self._offsets = [0] * request.n
        self._has_begun = [False] * request.n

    def whole(self, completions: Sequence[Completion]) -> JsonObject:
        """Return the whole answer."""
        self.num_sampled = sum(len(completion.tokens) for completion in completions)
        choices = [
            self._choice(index, completion.text, completion.tokens)
            for index, completion in enumerate(completions)
        ]
        head = self._head(self.kind, completions[0].policy)
        return {**head, "choices": choices, "usage": self._usage()}

    def first_chunks(self, policy: ServedPolicy) -> list[JsonObject]:
        """Return nothing: the first chunk is that of a token."""
        del policy
        return []

    def chunk(self, index: int, token: SampledToken) -> JsonObject:
        """Return the chunk of one token."""
        self.num_sampled += 1
        choice = self._choice(index, token.text, [token])
        return {**self._head(self.chunk_kind, token.policy), "choices": [choice]}

    def _choice(self, index: int, text: str, tokens: Sequence[SampledToken]) -> JsonObject:
        choice: JsonObject = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": tokens[-1].finish_reason,
            "stop_reason": tokens[-1].stop_reason,
        }
        if self._completion.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, tokens)
        if self._completion.return_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
            if not self._has_begun[index]:
                choice["prompt_token_ids"] = list(self.prompt_ids)
        self._has_begun[index] = True
        return choice

    def _logprobs(self, index: int, tokens: Sequence[SampledToken]) -> JsonObject:
        """Return the columns of `logprobs`, each [num_tokens]."""
        texts = [self.token_text(token.token_id) for token in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [json_logprob(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: SampledToken) -> dict[str, float]:
        listed = [(token.token_id, token.logprob), *token.top_logprobs]
        return {self.token_text(token_id): json_logprob(logprob) for token_id, logprob in listed}
