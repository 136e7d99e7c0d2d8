"""How triplets become the rows of a batch: values only, read by `agl_core.trajectory` and filled in
by an algorithm from its own configuration.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from agl_core.sampling import CHANGING

Truncation = Literal["drop", "left", "right", "error"]
"""What becomes of what is too long: the row is dropped, it is cut at its left or its right end, or
the iteration stops.
"""


class BatchSettings(BaseModel):
    """The rules of a batch. Lengths are tokens of a row at `level`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Literal["transition", "trajectory"] = "transition"
    """A row for each model call, or one for calls that continue each other token by token."""
    max_prompt_length: int = Field(ge=1)
    max_response_length: int = Field(ge=1)
    """A trajectory's response is everything after its first prompt."""
    prompt_truncation: Truncation = "drop"
    response_truncation: Truncation = "drop"
    unfinished: Literal["keep", "mask", "drop"] = "keep"
    """Rows whose last response was cut off (`agl_core.trajectory.finish`). Masked ones are in the
    batch with weight 0; their reward counts in their group's statistics."""
    learns: bool = True
    """False masks every row: the rollouts are scored and nothing is learned from them."""
    credit: Literal["final", "per_call", "discounted", "sum"] = "final"
    """The final reward on every row; each call's own rewards; the discounted return from each call
    on; or the sum of all rewards on every row. See `docs/design/trajectories.md`."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of `discounted`, for each call."""
    reward_weights: dict[str, FiniteFloat] | None = None
    """Weight of each dimension of a reward; others count 0. None takes the primary one alone."""
    drop_equal_rewards: bool = False
    """Drop groups whose rollouts all have one reward: they have no advantage."""
    min_group_size: Annotated[int, Field(ge=1)] = 2
    """Groups with fewer rollouts in the batch are dropped."""
    on_empty: Literal["fail", "skip"] = "fail"
    """What becomes of an iteration none of whose rows reaches the loss: it stops with an error, or
    it is committed without an update, and the next one goes on with the same policy."""
    temperature: float = Field(ge=0)
    """Of the run. Log-probs are compared at this sampling temperature; rows sampled at another one
    are dropped."""
    sampling: dict[str, float] = {}
    """Other fields by which the run samples, `top_p` for example (`agl_core.sampling`). Rows
    sampled from another distribution are dropped."""
    allowed_sampling: tuple[str, ...] = ()
    """Fields that agents may set to any value; their rows are trained like others."""

    @field_validator("allowed_sampling")
    @classmethod
    def _names_fields(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(value) - set(CHANGING)):
            raise ValueError(
                f"{', '.join(unknown)} is not a field that changes the distribution; "
                f"choose from {', '.join(sorted(CHANGING))}"
            )
        return value

    @model_validator(mode="after")
    def _says_what_it_does(self) -> "BatchSettings":
        if self.discount != 1.0 and self.credit != "discounted":
            raise ValueError(f"discount={self.discount} needs credit 'discounted'")
        if self.reward_weights is not None and not any(self.reward_weights.values()):
            raise ValueError("reward_weights has no weight other than 0")
        return self
