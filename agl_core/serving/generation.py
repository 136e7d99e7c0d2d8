"""What the embedded engine is asked for and what it answers: values, without torch or HTTP."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FinishReason = Literal["stop", "length"]
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The weights that an engine answers with."""

    version: str
    weights_digest: str
    """`agl_core.serving.weights.weights_digest` of the folder."""
    tokenizer_digest: str
    chat_template_digest: str | None
    folder: Path
    max_positions: int
    """Tokens of prompt and response together that the model was made for."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample.

    Raises:
        ValueError: The prompt is empty, `max_tokens` is below 1, the temperature is negative or not
            finite, seed or draw is out of range, or a stop text is empty.
    """

    version: str
    """Policy that must answer; another one refuses."""
    prompt_ids: list[int]
    """[prompt_length] token ids, at least one."""
    max_tokens: int
    """Most tokens to sample, the end token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    seed: int = 0
    """Seed of the request's own random stream; torch uses its low 32 bits on a CPU."""
    draw: int = 0
    """Which response of that seed this is: the n choices of one call are draws 0 to n-1."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; none is empty."""

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_tokens < 1:
            raise ValueError("a prompt and max_tokens need at least one token")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} is not a finite number from 0 up")
        if not MIN_SEED <= self.seed <= MAX_SEED or self.draw < 0:
            raise ValueError("seed must fit 64 bits and draw be 0 or more")
        if "" in self.stop:
            raise ValueError("an empty stop text would end every response")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response; `len(token_ids) == len(logprobs)`."""

    token_ids: list[int]
    """[response_length] sampled ids, with the end token where it was sampled."""
    logprobs: list[float]
    """[response_length] log-probs in nats at the sampling temperature; at 1 for greedy."""
    text: str
    """The response without the end token, and without the stop text and what follows it."""
    finish_reason: FinishReason
    policy: ServedPolicy
    """What sampled it."""
