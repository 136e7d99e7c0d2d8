"""Rollouts and their queue."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl_core.errors import StoreError
from agl_core.store.answer_table import new_id
from agl_core.store.database import Transaction
from agl_core.store.json_text import decode, encode, encode_records
from agl_core.store.resource_table import latest_id, require
from agl_core.store.schema import SELECT_ROLLOUTS, decode_or_none, encode_or_none, to_rollout
from agl_core.store.status import is_finished, is_queuing, may_follow
from agl_core.types.core import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
)


@dataclass(frozen=True, slots=True)
class NewRollout:
    """What a rollout will be, its values as the texts that are kept."""

    rollout_id: str
    mode: RolloutMode | None
    resources_id: str | None
    config: str
    metadata: str | None
    input: str

    def queued(self, start_time: float, latest: str | None) -> Rollout:
        """Return its record in the queue.

        Args:
            start_time: When it was queued, UTC epoch seconds.
            latest: Resources it has if it names none.
        """
        return Rollout(
            rollout_id=self.rollout_id,
            input=decode(self.input),
            start_time=start_time,
            mode=self.mode,
            resources_id=latest if self.resources_id is None else self.resources_id,
            config=decode(self.config),
            metadata=decode_or_none(self.metadata),
        )


def prepare(request: EnqueueRolloutRequest) -> NewRollout:
    """Make a new rollout's id and texts; before the transaction, which others wait for.

    Raises:
        StoreError: Its input or metadata have no form in JSON.
    """
    return NewRollout(
        rollout_id=new_id("ro", 6),
        mode=request.mode,
        resources_id=request.resources_id,
        config=encode_records(request.config or RolloutConfig()),
        metadata=encode_or_none(request.metadata, "metadata of a rollout"),
        input=encode(request.input, "input of a rollout"),
    )


def create(transaction: Transaction, rollouts: Sequence[NewRollout]) -> str | None:
    """Put rollouts at the end of the queue, in their order, and return the id of the resources of
    those that name none.

    Raises:
        StoreError: A `resources_id` that there is not.
    """
    latest = latest_id(transaction)
    for resources_id in {rollout.resources_id for rollout in rollouts}:
        if resources_id is not None:
            require(transaction, resources_id)
    place = _last_place(transaction)
    transaction.run_many(
        "INSERT INTO rollouts (rollout_id, status, queue_number, start_time, mode, resources_id,"
        " config, metadata, input) VALUES (?, 'queuing', ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                rollout.rollout_id,
                place + position,
                transaction.now,
                rollout.mode,
                latest if rollout.resources_id is None else rollout.resources_id,
                rollout.config,
                rollout.metadata,
                rollout.input,
            )
            for position, rollout in enumerate(rollouts, start=1)
        ],
    )
    return latest


def find(transaction: Transaction, rollout_id: str) -> Rollout | AttemptedRollout:
    """Return a rollout with its latest attempt.

    Raises:
        StoreError: Rollout not found.
    """
    row = transaction.one(f"{SELECT_ROLLOUTS} WHERE r.rollout_id = ?", rollout_id)
    if row is None:
        raise StoreError(f"Rollout {rollout_id} not found")
    return to_rollout(row)


def find_to_update(transaction: Transaction, rollout_id: str) -> Rollout | AttemptedRollout:
    """Return a rollout, as `find` does; the refusal also says what Agent Lightning's says.

    Raises:
        StoreError: Rollout not found.
    """
    try:
        return find(transaction, rollout_id)
    except StoreError as error:
        raise StoreError(
            f"{error}: Item does not exist with primary key(s): rollout_id={rollout_id!r}"
        ) from error


def find_many(
    transaction: Transaction, rollout_ids: Sequence[str]
) -> list[Rollout | AttemptedRollout]:
    """Return rollouts in the given order, each once; unknown ones are left out."""
    return in_order(find_rows(transaction, rollout_ids), rollout_ids)


def find_rows(transaction: Transaction, rollout_ids: Sequence[str]) -> list[sqlite3.Row]:
    """Return rollouts as rows, for `in_order` after the transaction."""
    return transaction.all(
        f"{SELECT_ROLLOUTS} WHERE r.rollout_id IN (SELECT value FROM json_each(?))",
        encode(list(rollout_ids)),
    )


def in_order(
    rows: Sequence[sqlite3.Row], rollout_ids: Sequence[str]
) -> list[Rollout | AttemptedRollout]:
    """Return the rollouts of rows in the given order, each once."""
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


def begin_attempts(transaction: Transaction, attempts: Sequence[tuple[Rollout, int]]) -> None:
    """Make rollouts `preparing`, out of the queue, each with the number of its new attempt.

    Raises:
        StoreError: One has ended.
    """
    for rollout, _ in attempts:
        if not may_follow(rollout.status, "preparing"):
            raise StoreError(
                f"Rollout {rollout.rollout_id} cannot go from {rollout.status} to preparing"
            )
    transaction.run_many(
        "UPDATE rollouts SET status = 'preparing', queue_number = NULL, num_attempts = ?"
        " WHERE rollout_id = ?",
        [(number, rollout.rollout_id) for rollout, number in attempts],
    )


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
