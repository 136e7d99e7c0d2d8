"""How an attempt ended, and what became of every rollout: values, never a reward of 0 for a
failure.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator


class FailureKind(StrEnum):
    """How one attempt ended."""

    SUCCEEDED = "succeeded"
    AGENT_ERROR = "agent_error"
    """The agent raised, or returned something that is not a reward."""
    TIMEOUT = "timeout"
    """The deadline passed before the agent returned."""
    INFRA_ERROR = "infra_error"
    """The model server, the proxy or the network failed."""
    NO_TRACE = "no_trace"
    """The agent returned, but no model call with token ids was recorded."""
    NO_REWARD = "no_reward"
    """The agent returned, but neither returned nor emitted a reward."""
    CANCELLED = "cancelled"


class AttemptOutcome(BaseModel):
    """The end of one attempt at one rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    """Position of the rollout among the requests of its set."""
    rollout_id: str
    attempt_id: str
    attempt: int
    """1-based number of the attempt."""
    kind: FailureKind
    reward: float | None
    """Final reward; None where the attempt did not succeed (what an agent gave is in its spans)."""
    message: str
    """What went wrong in one sentence; empty where the attempt succeeded."""
    traceback: str
    started: float
    """UTC epoch seconds."""
    duration_seconds: float
    num_calls: int
    """Model calls recorded."""
    prompt_tokens: int
    completion_tokens: int


class DropReason(StrEnum):
    """Why a built row, or a whole rollout, does not reach the loss."""

    PROMPT_TOO_LONG = "prompt_too_long"
    RESPONSE_TOO_LONG = "response_too_long"
    GROUP_TOO_SMALL = "group_too_small"
    GROUP_FAILED = "group_failed"
    """A rollout of its group failed in a way that drops the group."""
    OTHER_TEMPERATURE = "other_temperature"
    """The agent sampled at another temperature than the run's."""
    OTHER_SAMPLING = "other_sampling"
    """The agent set fields by which it sampled from another distribution than the run's."""
    UNFINISHED = "unfinished"
    """Its last response was cut off."""
    EQUAL_REWARDS = "equal_rewards"
    """All rollouts of its group have one reward."""
    UNUSABLE_REWARD = "unusable_reward"
    """No dimension of its rewards has a weight, or the weighted sum is not finite."""
    NO_PEER_AT_STEP = "no_peer_at_step"
    """Too few rollouts of the group made as many calls, so nothing compares with this one."""
    REJECTED = "rejected"
    """Rollout correction rejected every token."""
    NO_WEIGHT = "no_weight"
    """In the batch with weight 0, by policy."""
    NO_TOKEN_IDS = "no_token_ids"
    """Of a call: its token ids or log-probs are missing or incomplete, so it is in no row."""


class Coverage(BaseModel):
    """What became of the rollouts that an iteration expected; the counts must add up.

    Raises:
        ValueError: A rollout is unaccounted for (the counts do not add up to `expected`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    expected: int
    trained: int
    """Some token had loss weight."""
    masked: int
    """In the batch, but no token with loss weight."""
    filtered: int
    """Finished, then removed by a data rule."""
    failed: int
    """The last attempt did not succeed, and no row was built from it."""
    omitted: int
    """Deliberately not run."""
    unknown: int
    """None of these; a commit refuses them."""
    reasons: dict[str, int]
    """Rollouts by drop reason or failure kind."""
    rewards_by_policy: int = 0
    """Of the trained, masked and filtered ones: those without a reward, for which the run's
    settings have 0 (`failures.no_reward.then: zero`)."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        parts = (
            self.trained + self.masked + self.filtered + self.failed + self.omitted + self.unknown
        )
        if parts != self.expected:
            raise ValueError(
                f"coverage does not add up: expected {self.expected}, accounted for {parts}"
            )
        return self


class RowCoverage(BaseModel):
    """What became of the rows that were built: `built = trained + masked + sum(dropped)`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    built: int
    trained: int
    masked: int = 0
    """In the batch, but no token with loss weight."""
    dropped: Mapping[str, int]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.built != self.trained + self.masked + sum(self.dropped.values()):
            raise ValueError(f"row coverage does not add up: {self}")
        return self


class CallCoverage(BaseModel):
    """What became of the model calls that sampled tokens, of the rollouts that ended with a reward:
    `sampled = trained + masked + sum(dropped)`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampled: int
    trained: int
    """In a row with loss weight."""
    masked: int
    """In a row that is in the batch without loss weight."""
    dropped: Mapping[str, int]
    """By the drop reason of their row; `no_token_ids` for those that no row could be built of."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.sampled != self.trained + self.masked + sum(self.dropped.values()):
            raise ValueError(f"call coverage does not add up: {self}")
        return self


class TokenCoverage(BaseModel):
    """What became of the tokens that a policy sampled: `sampled = trained + masked + dropped`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampled: int
    trained: int
    """In the batch, with loss weight."""
    masked: int
    """In the batch with weight 0, by policy."""
    dropped: Mapping[str, int]
    """By the drop reason of their row; `truncated` for those that were cut off one, `other_choices`
    for those of a call's choices after the first one."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.sampled != self.trained + self.masked + sum(self.dropped.values()):
            raise ValueError(f"token coverage does not add up: {self}")
        return self
