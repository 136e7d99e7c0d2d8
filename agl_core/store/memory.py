"""The store in memory, which lets go of spans that have been used."""

import logging
import os
import time
from collections.abc import Callable, Sequence

from agl_core.store import span_table
from agl_core.store.attempt_table import Deadlines
from agl_core.store.base import LightningStoreStatistics
from agl_core.store.collection_based import CollectionBasedLightningStore
from agl_core.store.database import MEMORY, Transaction
from agl_core.store.schema import span_values
from agl_core.store.status import is_finished
from agl_core.types.tracer import Span

logger = logging.getLogger(__name__)

_TABLES = """
CREATE TABLE span_usage (
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    size_bytes INTEGER NOT NULL DEFAULT 0,
    was_used INTEGER NOT NULL DEFAULT 0,
    was_evicted INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (rollout_id, attempt_id)
);
CREATE INDEX evictable ON span_usage (rollout_id) WHERE was_used AND size_bytes > 0;
INSERT INTO meta VALUES ('span_bytes', 0);
"""


_SCOPE = "rollout_id = ? AND attempt_id = coalesce(?, attempt_id)"


class InMemoryLightningStore(CollectionBasedLightningStore):
    """A store that ends with its process.

    Spans above a threshold are evicted, those of the oldest rollouts first, until they fit below
    another. Only attempts that were used lose theirs: the rollout has ended, and then somebody read
    all spans of it, or of the attempt (`query_spans` without conditions), and none came since.
    Where nothing is left to evict the store grows and warns. Once an attempt's spans are evicted,
    what it adds cannot be read either: an answer is whole, or refused.

    Args:
        thread_safe: As in Agent Lightning; this store is thread-safe either way.
        eviction_memory_threshold: Bytes (int), or a share of the machine's memory (float).
        safe_memory_threshold: The same, below the other; None for 0.8 of it.
        span_size_estimator: Returns the bytes of a span; None for the length of its JSON.
        scan_debounce_seconds: See `StoreTables`.
        deadlines: See `StoreTables`.
        clock: See `StoreTables`.

    Raises:
        ValueError: A threshold is no such number, or the safe one is not below the other.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = False,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        span_size_estimator: Callable[[Span], int] | None = None,
        scan_debounce_seconds: float = 0.5,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        del thread_safe
        self._capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._evict_above = _threshold(
            "eviction_memory_threshold", eviction_memory_threshold, 0.7, self._capacity
        )
        self._evict_to = (
            int(0.8 * self._evict_above)
            if safe_memory_threshold is None
            else _threshold("safe_memory_threshold", safe_memory_threshold, 0.0, self._capacity)
        )
        if self._evict_to >= self._evict_above:
            raise ValueError(
                "safe_memory_threshold must be smaller than eviction_memory_threshold: "
                f"safe_memory_threshold is {self._evict_to} bytes, not below "
                f"eviction_memory_threshold, which is {self._evict_above}"
            )
        self._size = span_size_estimator
        self._warned = False
        super().__init__(
            MEMORY,
            scan_debounce_seconds=scan_debounce_seconds,
            deadlines=deadlines,
            clock=clock,
        )
        with self._database.write() as transaction:
            for statement in _TABLES.split(";"):
                transaction.run(statement)

    def _add_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        values = [span_values(span, self._size) for span in spans]
        with self._write() as transaction:
            last = transaction.value("SELECT max(number) FROM spans") or 0
            added = span_table.add(transaction, spans, values)
            _measure(transaction, last)
            if _span_bytes(transaction) > self._evict_above:
                self._evict(transaction)
            return added

    def _evict(self, transaction: Transaction) -> None:
        total = _span_bytes(transaction)
        for row in transaction.all(
            "SELECT u.rollout_id, u.attempt_id, u.size_bytes"
            " FROM span_usage u INDEXED BY evictable"
            " JOIN rollouts r ON r.rollout_id = u.rollout_id"
            " WHERE u.was_used AND u.size_bytes > 0 ORDER BY r.number"
        ):
            if total <= self._evict_to:
                break
            which = "rollout_id = ? AND attempt_id = ?"
            pair = row["rollout_id"], row["attempt_id"]
            transaction.run(f"DELETE FROM spans WHERE {which}", *pair)
            transaction.run(
                f"UPDATE span_usage SET size_bytes = 0, was_evicted = 1 WHERE {which}", *pair
            )
            total -= row["size_bytes"]
        transaction.run("UPDATE meta SET value = ? WHERE key = 'span_bytes'", total)
        if total > self._evict_above and not self._warned:
            logger.warning(
                "spans take %d bytes, above the threshold of %d, and none of them may be evicted",
                total,
                self._evict_above,
            )
        self._warned = total > self._evict_above

    def _require_spans(
        self, transaction: Transaction, rollout_id: str, attempt_id: str | None
    ) -> None:
        evicted = transaction.value(
            f"SELECT max(was_evicted) FROM span_usage WHERE {_SCOPE}", rollout_id, attempt_id
        )
        if evicted:
            raise RuntimeError(
                f"Spans for rollout {rollout_id} have been evicted; raise "
                "eviction_memory_threshold, or use a SqliteLightningStore"
            )

    def _spans_were_read(self, rollout_id: str, attempt_id: str | None, num_spans: int) -> None:
        with self._write() as transaction:
            status = transaction.value(
                "SELECT status FROM rollouts WHERE rollout_id = ?", rollout_id
            )
            scope = rollout_id, attempt_id
            held = transaction.value(f"SELECT count(*) FROM spans WHERE {_SCOPE}", *scope)
            if status is not None and is_finished(status) and held == num_spans:
                transaction.run(
                    f"UPDATE span_usage SET was_used = 1 WHERE {_SCOPE} AND NOT was_used", *scope
                )

    def _statistics(self, transaction: Transaction) -> LightningStoreStatistics:
        statistics = super()._statistics(transaction)
        statistics["total_span_bytes"] = _span_bytes(transaction)
        statistics["eviction_threshold_bytes"] = self._evict_above
        statistics["safe_threshold_bytes"] = self._evict_to
        statistics["memory_capacity_bytes"] = self._capacity
        return statistics


def _threshold(name: str, value: float | None, default: float, capacity: int) -> int:
    if value is None:
        value = default
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, float) and 0 <= value <= 1:
        return int(value * capacity)
    wrong = "must be non-negative" if isinstance(value, int) else "ratio must be between 0 and 1"
    raise ValueError(
        f"{name} {wrong}: {name} is {value!r}; it is bytes (int), or a share from 0.0 to 1.0 "
        "(float)"
    )


def _span_bytes(transaction: Transaction) -> int:
    return int(transaction.value("SELECT value FROM meta WHERE key = 'span_bytes'"))


def _measure(transaction: Transaction, last: int) -> None:
    """Count the spans that came after the row with the number `last`."""
    for row in transaction.all(
        "SELECT rollout_id, attempt_id, sum(size_bytes) AS size_bytes FROM spans WHERE number > ?"
        " GROUP BY +rollout_id, +attempt_id",  # the plus: only the new rows, not all by the index
        last,
    ):
        transaction.run(
            "INSERT INTO span_usage (rollout_id, attempt_id, size_bytes) VALUES (?, ?, ?)"
            " ON CONFLICT (rollout_id, attempt_id) DO UPDATE"
            # Nobody can read what follows evicted spans; it is not kept longer than them.
            " SET size_bytes = size_bytes + excluded.size_bytes, was_used = was_evicted",
            row["rollout_id"],
            row["attempt_id"],
            row["size_bytes"],
        )
        transaction.run(
            "UPDATE meta SET value = value + ? WHERE key = 'span_bytes'", row["size_bytes"]
        )
