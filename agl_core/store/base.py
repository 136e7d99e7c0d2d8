"""The contract between algorithms and runners.

What every store promises beyond the single methods:

- Returned records are copies; changing one changes nothing in the store.
- Rollouts and attempts move along the transitions of `agl_core.store.status` only. Ends are final:
  a late result of an attempt that timed out or was cancelled changes no status, and that of one
  that was superseded only its own; their spans are kept.
- A dequeued attempt is a lease: it belongs to one worker until `lease_seconds` after the last sign
  of life (`renew_leases`, a span, a status, the worker's heartbeat). An expired one ends as
  `unresponsive`, and the rollout is queued again where its config says so; until another attempt
  begins, the silent one may go on.
- Every attempt ends: there is a time limit where the config has none.
- A call repeated with the same `idempotency_key` within an hour has the effect of the first and
  answers with the same records, as they are now.
- Inputs, metadata and attributes are what JSON has a form for (NaN included), or become it as
  `agl_core.store.json_text` says: a model or dataclass comes back as an object. The rest (bytes,
  sets, integers of more than 64 bits) is refused.
- Time is UTC epoch seconds by the store's clock. It is the system's, as several processes share it,
  so leases and limits follow its jumps: one forward by more than a lease ends living attempts as
  `unresponsive` (they may go on as above), one back lets a dead worker's lease last longer by it.

Errors: `StoreError`, a `ValueError`, for what the caller asked wrongly, with the words that users
match on ("not found"); `TransientError` where another try may work (a file held by another process,
or a disk that is full).
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal, TypedDict

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.store.status import is_finished as is_finished  # Agent Lightning has them here
from agl_core.store.status import is_queuing as is_queuing
from agl_core.store.status import is_running as is_running
from agl_core.types.core import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    FilterLogic,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    Worker,
    WorkerStatus,
)
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import NamedResources, ResourcesUpdate
from agl_core.types.tracer import Span


class Unset(Enum):
    """Type of `UNSET`."""

    UNSET = "UNSET"


UNSET: Final = Unset.UNSET
"""A field that is not to be changed; None is a value."""


class LightningStoreCapabilities(TypedDict, total=False):
    """What a store can do; absent means no."""

    thread_safe: bool
    """Several threads, each with its own event loop, may use it at once."""
    async_safe: bool
    """Several tasks of one event loop may use it at once."""
    zero_copy: bool
    """Other processes may use the same object (it is a client, or pickles into one)."""
    otlp_traces: bool
    """Spans may be sent to `otlp_traces_endpoint()`."""


class LightningStoreStatistics(TypedDict, total=False):
    """What a store holds."""

    name: str
    run_id: str
    """Identity of the store, made when it was created; a client may insist on one."""
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float
    """Seconds since it was opened."""
    total_span_bytes: int
    eviction_threshold_bytes: int
    safe_threshold_bytes: int
    memory_capacity_bytes: int


class LightningStore:
    """Rollouts, attempts, resources, workers and spans of one training; methods not overridden
    raise `NotImplementedError`.
    """

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """What this store can do."""
        return LightningStoreCapabilities(
            thread_safe=False, async_safe=False, zero_copy=False, otlp_traces=False
        )

    async def statistics(self) -> LightningStoreStatistics:
        """Return counts of what the store holds."""
        raise NotImplementedError

    def otlp_traces_endpoint(self) -> str:
        """Return where OTLP/HTTP traces are received; only with the capability `otlp_traces`."""
        raise NotImplementedError

    # Rollouts and the queue.

    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> AttemptedRollout:
        """Make a rollout that the caller runs itself: `preparing`, with attempt 1, past the
        queue.

        Args:
            input: The task.
            mode: What it is for.
            resources_id: What it is given; None for the latest resources, if there are any.
            config: Deadline and retry rule; copied.
            metadata: Kept with it.
            worker_id: Who runs it; marked busy. Without one nobody sends heartbeats: it may be
                silent, up to the time limit, unless the config has `unresponsive_seconds`.
            idempotency_key: Of this call.

        Raises:
            ValueError: There are no such resources.
        """
        raise NotImplementedError

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> Rollout:
        """Queue one rollout and return it; see `start_rollout` for the arguments."""
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        (rollout,) = await self.enqueue_many_rollouts([request], idempotency_key=idempotency_key)
        return rollout

    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], *, idempotency_key: str | None = None
    ) -> Sequence[Rollout]:
        """Queue rollouts in their order, all or none.

        Raises:
            ValueError: There are no such resources.
        """
        raise NotImplementedError

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, idempotency_key: str | None = None
    ) -> AttemptedRollout | None:
        """Take the oldest queued rollout, or return None at once where none is queued."""
        taken = await self.dequeue_many_rollouts(
            limit=1, worker_id=worker_id, idempotency_key=idempotency_key
        )
        return taken[0] if taken else None

    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        lease_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        """Take up to `limit` queued rollouts, the oldest first; each gets its next attempt.

        Args:
            limit: None are taken where it is 0 or less.
            worker_id: Who runs them; busy with any that it got or still has, else idle.
            lease_seconds: How long it may be silent; None for the store's default. The config's
                `unresponsive_seconds` holds where it is shorter.
            idempotency_key: Of this call; where its answer was lost, the same key gives the same
                attempts again (those that have not ended).

        Raises:
            ValueError: `lease_seconds` is not above 0.
        """
        raise NotImplementedError

    async def renew_leases(
        self, worker_id: str, attempts: Sequence[tuple[str, str]]
    ) -> Sequence[str]:
        """Say that a worker still runs these attempts, so is busy; return the ids of those that it
        has to stop.

        An attempt has to stop where it has ended for the store: cancelled, timed out, expired or
        superseded; or where it is another worker's. One without a worker becomes this one's.

        Args:
            worker_id: Who runs them.
            attempts: Rollout id and attempt id of each.
        """
        raise NotImplementedError

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None
    ) -> AttemptedRollout:
        """Begin another attempt of a rollout that has not ended, whatever `max_attempts` says; an
        earlier one that still runs is superseded.

        Raises:
            ValueError: Rollout not found, or it has ended.
        """
        raise NotImplementedError

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout | AttemptedRollout]:
        """Return rollouts, each with its latest attempt if it has one, in order of creation unless
        `sort_by` names a field.

        Args:
            status_in: Only these.
            rollout_id_in: Only these.
            rollout_id_contains: Only ids that contain this text.
            filter_logic: Whether all of the conditions given must hold, or one.
            sort_by: A field of the rollout; None values come first in ascending order.
            sort_order: "asc" or "desc".
            limit: Most items; -1 for all, 0 for none (`total` is still counted).
            offset: Items to leave out before; an offset past the last gives an empty page.
            status: Deprecated name of `status_in`.
            rollout_ids: Deprecated name of `rollout_id_in`.

        Raises:
            ValueError: There is no such field, status or order, or a bound is negative.
        """
        raise NotImplementedError

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | AttemptedRollout | None:
        """Return a rollout with its latest attempt if it has one, or None."""
        raise NotImplementedError

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        """Change the given fields; an end also ends the running attempts, `requeuing` cancels them
        and queues the rollout again. Deadlines of a running attempt stay as they are.

        Raises:
            ValueError: Rollout or resources not found, or the transition is not legal, as to
                `preparing` or `running` is for a rollout that nobody runs.
        """
        raise NotImplementedError

    async def wait_for_rollouts(
        self,
        *,
        rollout_ids: Sequence[str],
        timeout: float | None = None,  # noqa: ASYNC109 - Agent Lightning's signature
    ) -> list[Rollout]:
        """Wait until these rollouts have ended and return those that have, in the given order, each
        once and with its latest attempt.

        Args:
            rollout_ids: Unknown ones are left out, and not waited for.
            timeout: Seconds after which those that have ended are returned; 0 for at once, None
                for no limit.

        Raises:
            ValueError: The timeout is NaN.
        """
        raise NotImplementedError

    # Attempts.

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Return the attempts of a rollout."""
        raise NotImplementedError

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the attempt with the highest number, or None."""
        raise NotImplementedError

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
        *,
        failure_kind: FailureKind | Unset | None = UNSET,
        failure_message: str | Unset | None = UNSET,
    ) -> Attempt:
        """Change the given fields; the latest attempt's status decides the rollout's.

        A status for an attempt that has ended is not applied, nor is its failure; the attempt is
        returned as it is.

        Raises:
            ValueError: Rollout or attempt not found, the status is unknown or a step back, or
                `last_heartbeat_time` is no time.
        """
        raise NotImplementedError

    # Resources.

    async def add_resources(
        self, resources: NamedResources, *, idempotency_key: str | None = None
    ) -> ResourcesUpdate:
        """Keep resources under a new id; they are the latest now."""
        raise NotImplementedError

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        """Keep resources as the next version of an id, which may be new; they are the latest."""
        raise NotImplementedError

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Return resources, the newest version of each id."""
        raise NotImplementedError

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """Return the newest version of an id, or None."""
        raise NotImplementedError

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return what was published last, or None."""
        raise NotImplementedError

    # Spans.

    async def add_span(self, span: Span) -> Span | None:
        """Keep one span; None where its span id is there already for this attempt.

        Raises:
            ValueError: Rollout or attempt not found.
        """
        added = await self.add_many_spans([span])
        return added[0] if added else None

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Keep spans of any attempts and return those that were new.

        The first span of an attempt makes it, and its rollout, `running`; each is a sign of life.

        Raises:
            ValueError: Rollout or attempt not found, or a sequence id above 2**53; nothing is kept.
        """
        raise NotImplementedError

    async def add_otel_span(
        self,
        rollout_id: str,
        attempt_id: str,
        readable_span: ReadableSpan,
        sequence_id: int | None = None,
    ) -> Span | None:
        """Keep one OpenTelemetry span; it gets the next sequence id unless one is given."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id)
        )

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """Return the spans of a rollout, or of one of its attempts, that meet the conditions.

        Raises:
            RuntimeError: Spans of the rollout, or of the attempt asked for, have been evicted.
        """
        raise NotImplementedError

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return the next sequence id of a rollout, from 1."""
        (sequence_id,) = await self.get_many_span_sequence_ids([(rollout_id, attempt_id)])
        return sequence_id

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        """Return the next sequence id for each pair of rollout id and attempt id, in their order;
        the same pair again and again takes a block.

        Raises:
            ValueError: Rollout not found.
        """
        raise NotImplementedError

    # Workers.

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Return the workers that meet the conditions."""
        raise NotImplementedError

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return a worker, or None."""
        raise NotImplementedError

    async def update_worker(
        self, worker_id: str, heartbeat_stats: Mapping[str, Any] | Unset = UNSET
    ) -> Worker:
        """Record a heartbeat of a worker, which may be new; a sign of life of the attempt that it
        took last (`renew_leases` is for several).
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Free what the store holds open."""
