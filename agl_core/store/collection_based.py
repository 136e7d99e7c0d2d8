"""The store over SQLite tables that both the one in memory and the one on disk are.

Each method is one transaction of `agl_core.store.database`, made where it is awaited; what happens
in it is in the modules named after the tables. This is the writing half; `StoreQueries` reads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from agl_core.errors import StoreError
from agl_core.store import (
    answer_table,
    attempt_table,
    leases,
    resource_table,
    rollout_table,
    span_table,
    worker_table,
)
from agl_core.store.base import UNSET, Unset
from agl_core.store.database import Transaction
from agl_core.store.json_text import encode, encode_records
from agl_core.store.queries import StoreQueries
from agl_core.store.schema import encode_or_none, span_values
from agl_core.store.tables import in_bulk
from agl_core.types.core import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Worker,
)
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import NamedResources, ResourcesUpdate
from agl_core.types.tracer import Span


class CollectionBasedLightningStore(StoreQueries):
    """A store whose records are rows of SQLite; `StoreTables` has the arguments."""

    async def start_rollout(  # noqa: D102 - as the contract says
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
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        new = rollout_table.prepare(request)
        with self._write() as transaction:
            known = answer_table.recall(transaction, "start_rollout", idempotency_key)
            if known is not None:
                return cast(AttemptedRollout, rollout_table.find(transaction, known[0][0]))
            latest = rollout_table.create(transaction, [new])
            ids = [[new.rollout_id]]
            answer_table.remember(transaction, "start_rollout", idempotency_key, ids)
            rollout = new.queued(transaction.now, latest)
            return self._begin_by_hand(transaction, rollout, worker_id)

    async def enqueue_many_rollouts(  # noqa: D102
        self, rollouts: Sequence[EnqueueRolloutRequest], *, idempotency_key: str | None = None
    ) -> Sequence[Rollout]:
        return await in_bulk(len(rollouts), self._enqueue, rollouts, idempotency_key)

    async def dequeue_many_rollouts(  # noqa: D102
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        lease_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        if limit <= 0:
            return []
        if lease_seconds is not None and not lease_seconds > 0:
            raise StoreError(f"lease_seconds is {lease_seconds}; it is above 0")
        return await in_bulk(limit, self._dequeue, limit, worker_id, lease_seconds, idempotency_key)

    async def renew_leases(  # noqa: D102
        self, worker_id: str, attempts: Sequence[tuple[str, str]]
    ) -> Sequence[str]:
        with self._write() as transaction:
            worker_table.record_heartbeat(transaction, worker_id)
            running = [pair for pair in attempts if leases.renew(transaction, *pair, worker_id)]
            if running and worker_table.require(transaction, worker_id).status != "busy":
                worker_table.assign(transaction, worker_id, *running[-1])
            return [pair[1] for pair in attempts if pair not in running]

    async def start_attempt(  # noqa: D102
        self, rollout_id: str, worker_id: str | None = None
    ) -> AttemptedRollout:
        with self._write() as transaction:
            rollout = rollout_table.find(transaction, rollout_id)
            return self._begin_by_hand(transaction, rollout, worker_id)

    async def update_rollout(  # noqa: D102
        self,
        rollout_id: str,
        input: Any | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        columns: dict[str, Any] = {}
        if input is not UNSET:
            columns["input"] = encode(input, f"input of {rollout_id}")
        if config is not UNSET:
            columns["config"] = encode_records(RolloutConfig.model_validate(config))
        if metadata is not UNSET:
            columns["metadata"] = encode_or_none(metadata, f"metadata of {rollout_id}")
        columns |= _given(mode=mode, resources_id=resources_id)
        with self._write() as transaction:
            rollout = rollout_table.find_to_update(transaction, rollout_id)
            rollout_table.update(transaction, rollout_id, columns)
            if status is not UNSET:
                attempt_table.set_rollout_status(transaction, rollout, status)
            return rollout_table.find(transaction, rollout_id)

    async def update_attempt(  # noqa: D102
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
        if last_heartbeat_time is not UNSET and not math.isfinite(last_heartbeat_time):
            raise StoreError(f"last_heartbeat_time is {last_heartbeat_time}; it is a time")
        columns = _given(worker_id=worker_id)
        if metadata is not UNSET:
            columns["metadata"] = encode_or_none(metadata, f"metadata of {attempt_id}")
        change = attempt_table.Change(
            status=None if status is UNSET else status,
            seen=None if last_heartbeat_time is UNSET else last_heartbeat_time,
            columns=columns,
            failure=_given(failure_kind=failure_kind, failure_message=failure_message),
        )
        with self._write() as transaction:
            return attempt_table.update(transaction, rollout_id, attempt_id, change)

    async def add_resources(  # noqa: D102
        self, resources: NamedResources, *, idempotency_key: str | None = None
    ) -> ResourcesUpdate:
        with self._write() as transaction:
            known = answer_table.recall(transaction, "add_resources", idempotency_key)
            if known is not None:
                return resource_table.require(transaction, known[0][0])
            added = resource_table.add(transaction, resources)
            ids = [[added.resources_id]]
            answer_table.remember(transaction, "add_resources", idempotency_key, ids)
            return added

    async def update_resources(  # noqa: D102
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        with self._write() as transaction:
            return resource_table.publish(transaction, resources_id, resources)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:  # noqa: D102
        return await in_bulk(len(spans), self._add_spans, spans)

    async def get_many_span_sequence_ids(  # noqa: D102
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        with self._write() as transaction:
            return span_table.next_sequence_ids(
                transaction, [rollout_id for rollout_id, _ in rollout_attempt_ids]
            )

    async def update_worker(  # noqa: D102
        self, worker_id: str, heartbeat_stats: Mapping[str, Any] | Unset = UNSET
    ) -> Worker:
        stats = None
        if heartbeat_stats is not UNSET:
            stats = encode(dict(heartbeat_stats), f"heartbeat_stats of {worker_id}")
        with self._write() as transaction:
            worker_table.record_heartbeat(transaction, worker_id, stats)
            worker = worker_table.require(transaction, worker_id)
            if worker.current_rollout_id is not None and worker.current_attempt_id is not None:
                current = worker.current_rollout_id, worker.current_attempt_id
                leases.renew(transaction, *current, worker_id)
            return worker

    def _enqueue(
        self, requests: Sequence[EnqueueRolloutRequest], key: str | None
    ) -> Sequence[Rollout]:
        new = [rollout_table.prepare(request) for request in requests]
        ids = [[rollout.rollout_id] for rollout in new]
        with self._write() as transaction:
            known = answer_table.recall(transaction, "enqueue", key)
            if known is not None:
                return rollout_table.find_many(transaction, [one[0] for one in known])
            latest = rollout_table.create(transaction, new)
            answer_table.remember(transaction, "enqueue", key, ids)
        return [rollout.queued(transaction.now, latest) for rollout in new]

    def _dequeue(
        self, limit: int, worker_id: str | None, lease_seconds: float | None, key: str | None
    ) -> Sequence[AttemptedRollout]:
        with self._write() as transaction:
            known = answer_table.recall(transaction, "dequeue", key)
            if known is not None:
                again = [pair[0] for pair in known if leases.renew(transaction, *pair)]
                found = rollout_table.find_many(transaction, again)
                return cast(list[AttemptedRollout], found)
            queued = rollout_table.queued(transaction, limit)
            taken = attempt_table.begin_many(
                transaction, queued, worker_id, self._deadlines, lease_seconds
            )
            if worker_id is not None:
                worker_table.record_dequeue(transaction, worker_id, got_any=bool(taken))
            if taken:
                ids = [[rollout.rollout_id, rollout.attempt.attempt_id] for rollout in taken]
                answer_table.remember(transaction, "dequeue", key, ids)
            return taken

    def _begin_by_hand(
        self, transaction: Transaction, rollout: Rollout, worker_id: str | None
    ) -> AttemptedRollout:
        """Make an attempt past the queue; without a worker nobody sends heartbeats for it."""
        lease = math.inf if worker_id is None else None
        return attempt_table.begin(transaction, rollout, worker_id, self._deadlines, lease)

    def _add_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        values = [span_values(span) for span in spans]
        with self._write() as transaction:
            return span_table.add(transaction, spans, values)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not UNSET}
