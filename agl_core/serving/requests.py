"""What every request for text to the embedded engine may say: checked fields, errors in words.

A field that the engine does not honour is an error, never ignored; one with the value that changes
nothing is taken.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agl_core.errors import ConfigError
from agl_core.sampling import NEUTRAL
from agl_core.serving.generation import MAX_SEED, MIN_SEED, GenerationRequest

TokenIds = list[Annotated[int, Field(ge=0)]]
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("request_id", "priority", "cache_salt"),
    }
)
"""Fields of OpenAI and vLLM that say nothing about the answer: dropped with any value."""
_NEUTRAL_ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Fields of both that are dropped with these values, which change nothing."""


class StreamOptions(BaseModel):
    """What a stream brings besides the response."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False
    """A chunk with the token counts, before `[DONE]`."""
    include_obfuscation: bool = False
    """Padding against eavesdroppers; there is none."""
    continuous_usage_stats: Literal[False] = False


class SamplingFields(BaseModel):
    """The fields that chat completions and completions share.

    Raises:
        ValidationError: A field is unknown, not supported with that value, or contradicts another.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    n: int = Field(default=1, ge=1, le=1024)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    """-1 and 0: all tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=16)
    stop_token_ids: TokenIds = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    min_p: Literal[0] = 0

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, value: Any) -> Any:
        """Read a null as an absent field, one stop text as a list of one, and 1.0 as 1."""
        if not isinstance(value, dict):
            return value
        fields = {key: item for key, item in value.items() if not _changes_nothing(key, item)}
        if isinstance(fields.get("stop"), str):
            fields["stop"] = [fields["stop"]]
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"):
            neutral = int(NEUTRAL[name])
            if fields.get(name) == neutral:
                fields[name] = neutral
        return fields

    @model_validator(mode="after")
    def _check_options(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def generations(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        seed: int,
        num_top_logprobs: int,
        forced_ids: list[int] | None,
    ) -> list[GenerationRequest]:
        """Return what the engine is asked for: `n` responses that differ by their draw.

        Raises:
            ConfigError: Forced ids meet top-p or top-k.
        """
        try:
            return [
                GenerationRequest(
                    version=self.model,
                    prompt_ids=prompt_ids,
                    max_tokens=max_tokens,
                    temperature=self.temperature,
                    seed=seed,
                    draw=draw,
                    stop=tuple(self.stop),
                    top_p=self.top_p,
                    top_k=max(0, self.top_k),
                    stop_token_ids=frozenset(self.stop_token_ids),
                    num_top_logprobs=num_top_logprobs,
                    forced_ids=None if forced_ids is None else tuple(forced_ids),
                )
                for draw in range(self.n)
            ]
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _changes_nothing(name: str, value: Any) -> bool:
    """Say whether a request means the same without a field."""
    return value is None or name in _WITHOUT_EFFECT or value in _NEUTRAL_ONLY.get(name, ())


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse_body(kind: type[RequestT], body: bytes) -> RequestT:
    """Return the checked request.

    Raises:
        ConfigError: The body is not JSON, or a field is unknown or not supported and then named.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from error


def _describe(error: ValidationError) -> str:
    """Return each problem as `field: reason`."""
    if error.error_count() > 100:
        return f"the request has {error.error_count()} problems; it is no {error.title}"
    problems: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in problem["loc"])
        reason = problem["msg"]
        if problem["type"] == "extra_forbidden":
            reason = "this field is not supported"
        problems.append(f"{field}: {reason}" if field else reason)
    return "; ".join(problems)
