"""The reading half of the store over SQLite: each method looks at one moment."""

import asyncio
import sqlite3
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from agl_core.store import resource_table, rollout_table, schema, worker_table
from agl_core.store.base import LightningStoreCapabilities, LightningStoreStatistics
from agl_core.store.database import Transaction
from agl_core.store.query import known, order_by, page, text_filters, where
from agl_core.store.status import is_finished
from agl_core.store.tables import StoreTables, in_bulk
from agl_core.store.waiting import check_timeout
from agl_core.types.core import (
    Attempt,
    AttemptedRollout,
    FilterLogic,
    FilterOptions,
    PaginatedResult,
    Rollout,
    RolloutStatus,
    SortOrder,
    Worker,
    WorkerStatus,
)
from agl_core.types.resources import ResourcesUpdate
from agl_core.types.tracer import Span

Record = TypeVar("Record")


class StoreQueries(StoreTables):
    """What is asked about records."""

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Any thread and any event loop may use it, one after the other or at once."""
        return LightningStoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=False, otlp_traces=False
        )

    async def statistics(self) -> LightningStoreStatistics:
        """Return counts of what the store holds."""
        with self._read() as transaction:
            return self._statistics(transaction)

    async def query_rollouts(  # noqa: D102 - as the contract says
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
        status_in = _renamed("status", status, "status_in", status_in)
        rollout_id_in = _renamed("rollout_ids", rollout_ids, "rollout_id_in", rollout_id_in)
        filters: dict[str, Any] = {"_aggregate": filter_logic}
        if status_in is not None:
            filters["status"] = {"within": known(status_in, RolloutStatus)}
        ids: dict[str, Any] = {}
        if rollout_id_in is not None:
            ids["within"] = rollout_id_in
        if rollout_id_contains is not None:
            ids["contains"] = rollout_id_contains
        if ids:
            filters["rollout_id"] = ids
        return await self._page(
            "rollouts r",
            filters,
            order_by(sort_by, sort_order, schema.ROLLOUT_FIELDS, "r."),
            schema.to_rollout,
            (limit, offset),
            columns=schema.ROLLOUT_FIELDS,
            select=schema.SELECT_ROLLOUTS,
        )

    async def get_rollout_by_id(  # noqa: D102
        self, rollout_id: str
    ) -> Rollout | AttemptedRollout | None:
        with self._read() as transaction:
            found = rollout_table.find_many(transaction, [rollout_id])
        return found[0] if found else None

    async def wait_for_rollouts(  # noqa: D102
        self,
        *,
        rollout_ids: Sequence[str],
        timeout: float | None = None,  # noqa: ASYNC109 - Agent Lightning's signature
    ) -> list[Rollout]:
        check_timeout(timeout)
        waiter = self._waiters.add(rollout_ids)
        try:
            with self._read() as transaction:
                pending = rollout_table.pending(transaction, rollout_ids)
            self._waiters.finished(set(rollout_ids) - pending)
            if pending and (timeout is None or timeout > 0):
                try:
                    async with asyncio.timeout(timeout):
                        await waiter.wait()
                except TimeoutError:
                    pass
        finally:
            self._waiters.remove(waiter)
        return await in_bulk(len(rollout_ids), self._finished, rollout_ids)

    async def query_attempts(  # noqa: D102
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        return await self._page(
            "attempts",
            {"rollout_id": {"exact": rollout_id}},
            order_by(sort_by, sort_order, schema.ATTEMPT_FIELDS),
            schema.to_attempt,
            (limit, offset),
            columns=schema.ATTEMPT_FIELDS,
        )

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:  # noqa: D102
        rollout = await self.get_rollout_by_id(rollout_id)
        return rollout.attempt if isinstance(rollout, AttemptedRollout) else None

    async def query_resources(  # noqa: D102
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        return await self._page(
            "resources",
            text_filters(resources_id=resources_id, resources_id_contains=resources_id_contains),
            order_by(sort_by, sort_order, schema.RESOURCES_FIELDS),
            schema.to_resources,
            (limit, offset),
            columns=schema.RESOURCES_FIELDS,
        )

    async def get_resources_by_id(  # noqa: D102
        self, resources_id: str
    ) -> ResourcesUpdate | None:
        with self._read() as transaction:
            return resource_table.find(transaction, resources_id)

    async def get_latest_resources(self) -> ResourcesUpdate | None:  # noqa: D102
        with self._read() as transaction:
            latest = resource_table.latest_id(transaction)
            return None if latest is None else resource_table.find(transaction, latest)

    async def query_spans(  # noqa: D102
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
        scope = {"rollout_id": {"exact": rollout_id}}
        if attempt_id == "latest":
            attempt = await self.get_latest_attempt(rollout_id)
            attempt_id = "" if attempt is None else attempt.attempt_id
        if attempt_id is not None:
            scope["attempt_id"] = {"exact": attempt_id}
        filters = text_filters(
            trace_id=trace_id,
            trace_id_contains=trace_id_contains,
            span_id=span_id,
            span_id_contains=span_id_contains,
            parent_id=parent_id,
            parent_id_contains=parent_id_contains,
            name=name,
            name_contains=name_contains,
        )
        spans = await self._page(
            "spans",
            {**filters, "_aggregate": filter_logic, "_must": scope},
            order_by(sort_by, sort_order, schema.SPAN_FIELDS),
            schema.to_span,
            (limit, offset),
            columns=schema.SPAN_FIELDS,
            check=lambda transaction: self._require_spans(transaction, rollout_id, attempt_id),
        )
        if not filters and (limit, offset) == (-1, 0):
            self._spans_were_read(rollout_id, attempt_id, spans.total)
        return spans

    async def query_workers(  # noqa: D102
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
        filters: dict[str, Any] = text_filters(worker_id_contains=worker_id_contains)
        if status_in is not None:
            filters["status"] = {"within": known(status_in, WorkerStatus)}
        return await self._page(
            "workers",
            {**filters, "_aggregate": filter_logic},
            order_by(sort_by, sort_order, schema.WORKER_FIELDS),
            schema.to_worker,
            (limit, offset),
            columns=schema.WORKER_FIELDS,
        )

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:  # noqa: D102
        with self._read() as transaction:
            return worker_table.find(transaction, worker_id)

    def _finished(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        with self._read() as transaction:
            rows = rollout_table.find_rows(transaction, rollout_ids)
        found = rollout_table.in_order(rows, rollout_ids)
        return [rollout for rollout in found if is_finished(rollout.status)]

    def _require_spans(
        self, transaction: Transaction, rollout_id: str, attempt_id: str | None
    ) -> None:
        """Raise if spans of a rollout, or of its one attempt that is asked for, have been evicted;
        a store on disk keeps them all.
        """

    def _spans_were_read(self, rollout_id: str, attempt_id: str | None, num_spans: int) -> None:
        """Note that somebody has read the spans of a rollout, or of one of its attempts, and how
        many there were.
        """

    def _statistics(self, transaction: Transaction) -> LightningStoreStatistics:
        def count(table: str) -> int:
            return transaction.value(f"SELECT count(*) FROM {table}")

        return LightningStoreStatistics(
            name=type(self).__name__,
            run_id=self._run_id,
            total_rollouts=count("rollouts"),
            total_attempts=count("attempts"),
            total_spans=count("spans"),
            total_resources=count("resources"),
            total_workers=count("workers"),
            uptime=time.monotonic() - self._opened,
        )

    async def _page(
        self,
        table: str,
        filters: FilterOptions,
        order: str,
        to_record: Callable[[sqlite3.Row], Record],
        bounds: tuple[int, int],
        *,
        columns: Sequence[str],
        select: str = "",
        check: Callable[[Transaction], None] | None = None,
    ) -> PaginatedResult[Record]:
        """Return the records of a table (with its alias) that meet the conditions.

        Args:
            table: Its name, and its alias if `select` has one.
            filters: Conditions.
            order: ORDER BY clause.
            to_record: Makes a record from a row.
            bounds: Limit and offset.
            columns: Fields that conditions may name.
            select: Up to the condition; by default all columns of the table.
            check: Raises where there is no answer; looks at the same moment.
        """
        alias = f"{table.split()[1]}." if " " in table else ""
        condition, parameters = where(filters, columns, alias)
        limits, numbers = page(*bounds)
        with self._read() as transaction:
            if check is not None:
                check(transaction)
            count = f"SELECT count(*) FROM {table} WHERE {condition}"
            total: int = transaction.value(count, *parameters)
            rows = transaction.all(
                # Sorting and cutting row numbers first keeps whole rows out of it.
                f"{select or f'SELECT * FROM {table}'} WHERE {alias}rowid IN"
                f" (SELECT {alias}rowid FROM {table} WHERE {condition} {order} {limits}) {order}",
                *parameters,
                *numbers,
            )
        records = await in_bulk(len(rows), lambda: [to_record(row) for row in rows])
        limit, offset = bounds
        return PaginatedResult(items=records, limit=limit, offset=offset, total=total)


def _renamed(
    old: str, old_value: Sequence[Any] | None, new: str, new_value: Sequence[Any] | None
) -> Sequence[Any] | None:
    if old_value is not None:
        warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)
    return old_value if new_value is None else new_value
