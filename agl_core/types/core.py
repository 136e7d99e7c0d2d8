"""Rollouts, attempts, workers and what is asked about them, by Agent Lightning's names.

A rollout is one execution of an agent on one input; an attempt is one try of it. Their legal
transitions are in `agl_core.store.status`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import (
    Any,
    Generic,
    Literal,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    overload,
)

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agl_core.types.outcome import FailureKind

RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal[
    "queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"
]
AttemptStatus = Literal[
    "preparing", "running", "failed", "succeeded", "unresponsive", "timeout", "cancelled"
]
"""Agent Lightning's six, and `cancelled` for an attempt whose rollout was cancelled."""
TaskInput = Any
"""What an agent is given."""
WorkerStatus = Literal["idle", "busy", "unknown"]
SortOrder = Literal["asc", "desc"]
FilterLogic = Literal["and", "or"]

T_co = TypeVar("T_co", covariant=True)

_RECORD = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
"""In JSON, NaN and infinities stay what they are."""


class RolloutConfig(BaseModel):
    """Deadline and retry rule of one rollout."""

    model_config = _RECORD

    timeout_seconds: float | None = Field(default=None, gt=0)
    """Limit of one attempt; None for the store's default, infinity for no limit."""
    unresponsive_seconds: float | None = Field(default=None, gt=0)
    """How long an attempt may show no sign of life (span or heartbeat); None for the store's
    default, infinity for no limit.
    """
    max_attempts: int = Field(default=1, ge=1)
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])
    """Ends of an attempt after which another one is made."""


class Rollout(BaseModel):
    """One execution of an agent on one input."""

    model_config = _RECORD

    rollout_id: str
    input: Any
    start_time: float
    """When it was asked for, UTC epoch seconds."""
    end_time: float | None = None
    """When it ended; None while it has not."""
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None


class Attempt(BaseModel):
    """One try of a rollout."""

    model_config = _RECORD

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1-based number of the attempt."""
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    """Last sign of life: a span, a status, or a heartbeat of the worker."""
    metadata: dict[str, Any] | None = None
    failure_kind: FailureKind | None = None
    """Why it did not succeed; None while it runs, where it did, and where nobody said."""
    failure_message: str | None = None
    """The same in one sentence."""


class AttemptedRollout(Rollout):
    """A rollout together with one of its attempts."""

    attempt: Attempt

    @model_validator(mode="after")
    def _same_rollout(self) -> Self:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(
                "Inconsistent rollout_id between Rollout and Attempt: "
                f"attempt belongs to rollout {self.attempt.rollout_id}, not {self.rollout_id}"
            )
        return self


class EnqueueRolloutRequest(BaseModel):
    """One rollout to put into the queue."""

    model_config = _RECORD

    input: Any
    mode: RolloutMode | None = None
    resources_id: str | None = None
    """What the rollout is given; None for the resources that are latest when it is asked for."""
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


class Worker(BaseModel):
    """A runner as the store knows it."""

    model_config = _RECORD

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    """What the worker last said about its machine."""
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


class Triplet(BaseModel):
    """One model call: what it saw, what it answered, what that was worth."""

    model_config = _RECORD

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class PaginatedResult(BaseModel, Sequence[T_co], Generic[T_co]):
    """One page of an answer; a sequence of its items."""

    model_config = _RECORD

    items: Sequence[T_co]
    limit: int
    """The most items that were asked for; -1 for all."""
    offset: int
    """Items before this page."""
    total: int
    """Items of all pages."""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T_co]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Iterate over the items (pydantic's own iterates over the fields)."""
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Sequence[T_co]:
        return self.items[index]

    def __repr__(self) -> str:
        end = "" if self.limit == -1 else self.offset + len(self.items)
        first = [repr(item) for item in self.items[:1]] + ["..."] * (len(self.items) > 1)
        return f"<PaginatedResult ({self.offset}:{end} of {self.total}) [{', '.join(first)}]>"


class FilterField(TypedDict, total=False):
    """Conditions on one field; joined like those of different fields."""

    exact: Any
    within: Sequence[Any]
    contains: str


FilterOptions = Mapping[str, Any]
"""Field names to `FilterField`; `_aggregate` ("and" or "or") joins them, and what is under `_must`
(one such mapping or several) always holds."""


class SortOptions(TypedDict):
    """By which field to sort, and which way."""

    name: str
    order: SortOrder


class Dataset(Protocol[T_co]):
    """Rows by position."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """Return one row."""
        ...


class ParallelWorkerBase:
    """Something that is set up once, then once in each worker; by default nothing is done."""

    worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Set up before the workers start."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Set up in one worker.

        Args:
            worker_id: Number of the worker, from 0.
            args: Of the component.
            kwargs: Of the component.
        """
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""


class Hook(ParallelWorkerBase):
    """What a user wants done around each attempt; errors of hooks are logged, not raised."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Act before the trace of an attempt begins."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Act inside the trace, before the agent."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        """Act inside the trace, after the agent."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        """Act when the attempt has ended and its spans are known."""
