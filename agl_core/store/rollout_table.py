"""Rollouts and their queue."""

from collections.abc import Mapping, Sequence
from typing import Any

from agl_core.errors import StoreError
from agl_core.store.answer_table import new_id
from agl_core.store.database import Transaction
from agl_core.store.json_text import encode, encode_records
from agl_core.store.resource_table import latest_id, require
from agl_core.store.schema import SELECT_ROLLOUTS, encode_or_none, to_rollout
from agl_core.store.status import is_finished, is_queuing, may_follow
from agl_core.types.core import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)


def create(
    transaction: Transaction, requests: Sequence[EnqueueRolloutRequest]
) -> list[Rollout | AttemptedRollout]:
    """Put rollouts at the end of the queue, in their order.

    Raises:
        StoreError: A `resources_id` that there is not, or an input that JSON has no form for.
    """
    latest = latest_id(transaction)
    for resources_id in {request.resources_id for request in requests}:
        if resources_id is not None:
            require(transaction, resources_id)
    place = _last_place(transaction)
    ids = [new_id("ro", 6) for _ in requests]
    transaction.run_many(
        "INSERT INTO rollouts (rollout_id, status, queue_number, start_time, mode, resources_id,"
        " config, metadata, input) VALUES (?, 'queuing', ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                rollout_id,
                place + position,
                transaction.now,
                request.mode,
                latest if request.resources_id is None else request.resources_id,
                encode_records(request.config or RolloutConfig()),
                encode_or_none(request.metadata, "metadata of a rollout"),
                encode(request.input, "input of a rollout"),
            )
            for position, (rollout_id, request) in enumerate(
                zip(ids, requests, strict=True), start=1
            )
        ],
    )
    return find_many(transaction, ids)


def find(transaction: Transaction, rollout_id: str) -> Rollout | AttemptedRollout:
    """Return a rollout with its latest attempt.

    Raises:
        StoreError: Rollout not found.
    """
    row = transaction.one(f"{SELECT_ROLLOUTS} WHERE r.rollout_id = ?", rollout_id)
    if row is None:
        raise StoreError(f"Rollout {rollout_id} not found")
    return to_rollout(row)


def find_many(
    transaction: Transaction, rollout_ids: Sequence[str]
) -> list[Rollout | AttemptedRollout]:
    """Return rollouts in the given order, each once; unknown ones are left out."""
    rows = transaction.all(
        f"{SELECT_ROLLOUTS} WHERE r.rollout_id IN (SELECT value FROM json_each(?))",
        encode(list(rollout_ids)),
    )
    found = {row["rollout_id"]: to_rollout(row) for row in rows}
    return [found[rollout_id] for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in found]


def queued(transaction: Transaction, limit: int) -> list[Rollout | AttemptedRollout]:
    """Return the first rollouts of the queue."""
    rows = transaction.all(
        f"{SELECT_ROLLOUTS} WHERE r.queue_number IS NOT NULL ORDER BY r.queue_number LIMIT ?", limit
    )
    return [to_rollout(row) for row in rows]


def pending(transaction: Transaction, rollout_ids: Sequence[str]) -> set[str]:
    """Return those of some rollouts that exist and have not ended."""
    rows = transaction.all(
        "SELECT rollout_id, status FROM rollouts"
        " WHERE rollout_id IN (SELECT value FROM json_each(?))",
        encode(list(rollout_ids)),
    )
    return {row["rollout_id"] for row in rows if not is_finished(row["status"])}


def set_status(
    transaction: Transaction, rollout_id: str, before: RolloutStatus, after: RolloutStatus
) -> None:
    """Give a rollout a status: it enters or leaves the queue, or ends.

    Raises:
        StoreError: It cannot go there.
    """
    if before == after:
        return
    if not may_follow(before, after):
        raise StoreError(f"Rollout {rollout_id} cannot go from {before} to {after}")
    if not (is_queuing(before) and is_queuing(after)):
        place = _last_place(transaction) + 1 if is_queuing(after) else None
        transaction.run(
            "UPDATE rollouts SET queue_number = ? WHERE rollout_id = ?", place, rollout_id
        )
    ended = is_finished(after)
    transaction.run(
        "UPDATE rollouts SET status = ?, end_time = ? WHERE rollout_id = ?",
        after,
        transaction.now if ended else None,
        rollout_id,
    )
    if ended:
        transaction.finished.append(rollout_id)


def update(transaction: Transaction, rollout_id: str, columns: Mapping[str, Any]) -> None:
    """Change columns of a rollout.

    Args:
        transaction: In which.
        rollout_id: Of a rollout that there is.
        columns: Values of `input`, `mode`, `resources_id`, `config`, `metadata`, as they are kept.

    Raises:
        StoreError: There are no such resources.
    """
    if columns.get("resources_id") is not None:
        require(transaction, columns["resources_id"])
    for column, value in columns.items():
        transaction.run(f"UPDATE rollouts SET {column} = ? WHERE rollout_id = ?", value, rollout_id)


def _last_place(transaction: Transaction) -> int:
    last = transaction.value(
        "SELECT max(queue_number) FROM rollouts WHERE queue_number IS NOT NULL"
    )
    return last or 0
