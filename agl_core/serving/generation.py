"""What the embedded engine is asked for and what it answers: values, without torch or HTTP."""

from collections.abc import Callable
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
    num_tokens: int
    """Size of its vocabulary; ids are below it."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample.

    Raises:
        ValueError: The prompt is empty, a number is out of its range, a stop text is empty, or
            forced ids meet truncated sampling.
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
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens with at least this probability."""
    top_k: int = 0
    """Sample from that many likeliest tokens; 0 from all. Applied before `top_p`."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the response, besides the policy's own end tokens."""
    num_top_logprobs: int = 0
    """Likeliest tokens to list at each position."""
    forced_ids: tuple[int, ...] | None = None
    """Continue with these ids instead of sampled ones; the response ends with them at the latest.
    """

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_tokens < 1:
            raise ValueError("a prompt and max_tokens need at least one token")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} is not a finite number from 0 up")
        if not MIN_SEED <= self.seed <= MAX_SEED or self.draw < 0:
            raise ValueError("seed must fit 64 bits and draw be 0 or more")
        if "" in self.stop:
            raise ValueError("an empty stop text would end every response")
        if not 0 < self.top_p <= 1 or self.top_k < 0 or self.num_top_logprobs < 0:
            raise ValueError(
                "top_p is above 0 and at most 1; top_k and num_top_logprobs are from 0"
            )
        if self.forced_ids is not None and (not self.forced_ids or self.is_truncated):
            raise ValueError("forced ids: at least one, and neither top_p nor top_k")

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens may not be sampled."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a response, and what it adds to the text."""

    token_id: int
    logprob: float
    """In nats, of the distribution that it was sampled from; see `Completion.logprobs`."""
    top_logprobs: list[tuple[int, float]]
    """[num_top_logprobs] the likeliest ids with their log-probs, likeliest first."""
    text: str
    """Text that is certain now: nothing that may become part of a stop text or of a character."""
    policy: ServedPolicy
    """What sampled it."""
    finish_reason: FinishReason | None = None
    """Set in the last token."""
    stop_reason: int | str | None = None
    """The stop text or stop token id that ended the response; None for an end token."""


OnToken = Callable[[SampledToken], None]
"""Gets each token as it is sampled, in the engine's thread: it must return at once."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response; at least one token."""

    tokens: list[SampledToken]
    """[response_length] with the end token, where it was sampled, last."""
    text: str
    """The response without the end token, and without the stop text and what follows it."""

    @property
    def token_ids(self) -> list[int]:
        """[response_length] ids."""
        return [token.token_id for token in self.tokens]

    @property
    def logprobs(self) -> list[float]:
        """[response_length] log-probs in nats of the distribution that was sampled from.

        That is `softmax(logits / temperature)`, cut to the tokens that top-k and top-p leave and
        normalised again, as vLLM's `processed_logprobs` (`TopKTopPSampler.forward_native`). Greedy
        tokens have those of temperature 1 over all tokens.
        """
        return [token.logprob for token in self.tokens]

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        reason = self.tokens[-1].finish_reason
        assert reason is not None, "a completion ends with its last token"
        return reason

    @property
    def stop_reason(self) -> int | str | None:
        """Which stop text or stop token id ended it."""
        return self.tokens[-1].stop_reason

    @property
    def policy(self) -> ServedPolicy:
        """What sampled it."""
        return self.tokens[-1].policy
