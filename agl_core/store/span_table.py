"""Spans: kept once each, in the order of their sequence ids."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from agl_core.errors import StoreError
from agl_core.store import attempt_table, rollout_table
from agl_core.store.database import Transaction
from agl_core.store.json_text import encode
from agl_core.store.schema import SPAN_FIELDS
from agl_core.types.tracer import Span

_COLUMNS = ", ".join((*SPAN_FIELDS, "size_bytes", "attributes", "rest"))
_INSERT = f"INSERT INTO spans ({_COLUMNS}) VALUES ({', '.join('?' * (len(SPAN_FIELDS) + 3))})"


def add(
    transaction: Transaction,
    spans: Sequence[Span],
    values: Sequence[tuple[Any, ...]],
) -> list[Span]:
    """Keep spans of any attempts and return those that were new, in their order.

    Args:
        transaction: In which.
        spans: Of any rollouts.
        values: Columns of each span (`schema.span_values`), made before the transaction, which
            others wait for.

    Raises:
        StoreError: Rollout or attempt not found.
    """
    by_attempt: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_attempt[span.rollout_id, span.attempt_id].append(span)
    known = {
        pair: _known_ids(transaction, *pair, [span.span_id for span in group])
        for pair, group in by_attempt.items()
    }
    added: list[Span] = []
    rows: list[tuple[Any, ...]] = []
    for span, row in zip(spans, values, strict=True):
        ids = known[span.rollout_id, span.attempt_id]
        if span.span_id not in ids:
            ids.add(span.span_id)
            added.append(span)
            rows.append(row)
    transaction.run_many(_INSERT, rows)
    _raise_sequence_ids(transaction, added)
    alive = {(span.rollout_id, span.attempt_id) for span in added}
    for rollout_id, attempt_id in by_attempt:
        attempt = attempt_table.find(transaction, rollout_id, attempt_id)
        if (rollout_id, attempt_id) in alive:
            rollout = rollout_table.find(transaction, rollout_id)
            attempt_table.set_status(
                transaction,
                rollout,
                attempt,
                "running" if attempt.status in ("preparing", "unresponsive") else attempt.status,
            )
            attempt_table.show_life(transaction, rollout_id, attempt_id)
    return added


def next_sequence_ids(transaction: Transaction, rollout_ids: Sequence[str]) -> list[int]:
    """Return the next sequence id for each rollout named, as often as it is named.

    Raises:
        StoreError: Rollout not found.
    """
    following: dict[str, int] = {}
    for rollout_id, count in Counter(rollout_ids).items():
        first = transaction.value(
            "SELECT next_span_sequence_id FROM rollouts WHERE rollout_id = ?", rollout_id
        )
        if first is None:
            raise StoreError(f"Rollout {rollout_id} not found")
        following[rollout_id] = first
        transaction.run(
            "UPDATE rollouts SET next_span_sequence_id = ? WHERE rollout_id = ?",
            first + count,
            rollout_id,
        )
    sequence_ids: list[int] = []
    for rollout_id in rollout_ids:
        sequence_ids.append(following[rollout_id])
        following[rollout_id] += 1
    return sequence_ids


def _known_ids(
    transaction: Transaction, rollout_id: str, attempt_id: str, span_ids: Sequence[str]
) -> set[str]:
    rows = transaction.all(
        "SELECT span_id FROM spans WHERE rollout_id = ? AND attempt_id = ?"
        " AND span_id IN (SELECT value FROM json_each(?))",
        rollout_id,
        attempt_id,
        encode(span_ids),
    )
    return {row["span_id"] for row in rows}


def _raise_sequence_ids(transaction: Transaction, spans: Sequence[Span]) -> None:
    highest: dict[str, int] = {}
    for span in spans:
        highest[span.rollout_id] = max(highest.get(span.rollout_id, 0), span.sequence_id)
    for rollout_id, sequence_id in highest.items():
        transaction.run(
            "UPDATE rollouts SET next_span_sequence_id = ?"
            " WHERE rollout_id = ? AND next_span_sequence_id <= ?",
            sequence_id + 1,
            rollout_id,
            sequence_id,
        )
