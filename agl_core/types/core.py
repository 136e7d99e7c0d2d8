"""Rollouts and attempts, by Agent Lightning's names."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal[
    "queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"
]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]


class RolloutConfig(BaseModel):
    """Deadline and retry rule of one rollout."""

    model_config = ConfigDict(extra="forbid")

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = Field(default=1, ge=1)
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])


class Rollout(BaseModel):
    """One execution of an agent on one input."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: str
    input: Any
    start_time: float
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None


class Attempt(BaseModel):
    """One try of a rollout."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1-based number of the attempt."""
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None


class AttemptedRollout(Rollout):
    """A rollout together with the attempt that is being made."""

    attempt: Attempt

    @model_validator(mode="after")
    def _same_rollout(self) -> Self:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(
                f"attempt belongs to rollout {self.attempt.rollout_id}, not {self.rollout_id}"
            )
        return self
