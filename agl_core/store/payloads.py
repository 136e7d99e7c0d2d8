"""What requests to the store's server say, by Agent Lightning 0.3's names; used by `wire`."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, RootModel

from agl_core.types.core import EnqueueRolloutRequest, RolloutConfig, RolloutMode
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import NamedResources
from agl_core.types.tracer import Span

T = TypeVar("T")
Many = Annotated[list[T], FailFast(), Field(max_length=50_000)]
"""A list of which the first wrong item is told: millions of errors would take minutes and GBs.

Its length is limited (50,000): all items are checked in one go, while nothing else is answered.
"""


class Arguments(BaseModel):
    """What a request says; what it leaves out is the method's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Changes(Arguments):
    """New values of fields; a null where the field has none is refused (400)."""


class Enqueue(Arguments):
    """Rollouts to queue."""

    rollouts: Many[EnqueueRolloutRequest]


class Dequeue(Arguments):
    """How many rollouts to take, and who takes them."""

    limit: int = 1
    worker_id: str | None = None
    lease_seconds: float | None = None


class StartRollout(Arguments):
    """A rollout past the queue."""

    input: Any
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    worker_id: str | None = None


class StartAttempt(Arguments):
    """Who runs it."""

    worker_id: str | None = None


class RenewLeases(Arguments):
    """Attempts that still run, each by rollout id and attempt id."""

    worker_id: str
    attempts: Many[tuple[str, str]]


class Wait(Arguments):
    """Rollouts to wait for, and how long; null for as long as the server holds a request."""

    rollout_ids: Many[str]
    timeout: float | None = 0.0


class Page(Arguments):
    """Which part of an answer, in which order."""

    # Words that the store knows, and refuses itself, are plain texts here.
    sort_by: str | None = None
    sort_order: str = "asc"
    limit: int = -1
    offset: int = 0


class RolloutQuery(Page):
    """Conditions on rollouts."""

    status_in: list[str] | None = None
    rollout_id_in: list[str] | None = None
    rollout_id_contains: str | None = None
    filter_logic: str = "and"


class WorkerQuery(Page):
    """Conditions on workers."""

    status_in: list[str] | None = None
    worker_id_contains: str | None = None
    filter_logic: str = "and"


class ResourcesQuery(Page):
    """Conditions on resources."""

    resources_id: str | None = None
    resources_id_contains: str | None = None


class SpanQuery(Page):
    """Conditions on the spans of a rollout."""

    rollout_id: str
    attempt_id: str | None = None
    trace_id: str | None = None
    trace_id_contains: str | None = None
    span_id: str | None = None
    span_id_contains: str | None = None
    parent_id: str | None = None
    parent_id_contains: str | None = None
    name: str | None = None
    name_contains: str | None = None
    filter_logic: str = "and"


class UpdateRollout(Changes):
    """Changes of a rollout."""

    input: Any = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: str = ""
    config: RolloutConfig = RolloutConfig()
    metadata: dict[str, Any] | None = None


class UpdateAttempt(Changes):
    """Changes of an attempt."""

    status: str = ""
    worker_id: str = ""
    last_heartbeat_time: float = 0.0
    metadata: dict[str, Any] | None = None
    failure_kind: FailureKind | None = None
    failure_message: str | None = None


class UpdateWorker(Changes):
    """A heartbeat."""

    heartbeat_stats: dict[str, Any] = {}


class Resources(RootModel[Annotated[NamedResources, Field(max_length=10_000)]]):
    """The payload is the argument `resources`."""


class OneSpan(RootModel[Span]):
    """The payload is the argument `span`."""


class ManySpans(Arguments):
    """Spans of any attempts."""

    spans: Annotated[list[Span], FailFast(), Field(max_length=20_000)]
    """A span takes longer to check than other items."""


class NextSpan(Arguments):
    """Whose sequence id is wanted."""

    rollout_id: str
    attempt_id: str


class NextSpans(Arguments):
    """The same for many, each by rollout id and attempt id."""

    rollout_attempt_ids: Many[tuple[str, str]]
