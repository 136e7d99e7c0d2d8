"""Attempts: begun, kept alive, ended; each end decides the rollout where it is the latest's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_core.errors import StoreError
from agl_core.store import rollout_table, worker_table
from agl_core.store.answer_table import new_id
from agl_core.store.database import Transaction
from agl_core.store.schema import to_attempt
from agl_core.store.status import (
    ATTEMPT_STATUSES,
    ROLLOUT_STATUSES,
    attempt_may_follow,
    is_finished,
    is_queuing,
    is_running,
    may_recover,
    rollout_status,
)
from agl_core.types.core import Attempt, AttemptedRollout, AttemptStatus, Rollout, RolloutStatus
from agl_core.types.outcome import FailureKind


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long attempts may take where their rollout's config does not say."""

    lease_seconds: float = 60.0
    """How long a worker may show no sign of life; six heartbeats of 10 s."""
    timeout_seconds: float = 3600.0
    """Limit of one attempt, so that a hung agent of a living worker ends; `math.inf` for none."""


def begin(
    transaction: Transaction,
    rollout: Rollout,
    worker_id: str | None,
    deadlines: Deadlines,
    lease_seconds: float | None,
) -> AttemptedRollout:
    """Make the next attempt of a rollout, which leaves the queue.

    Args:
        transaction: In which.
        rollout: As it is now.
        worker_id: Who runs it.
        deadlines: The store's.
        lease_seconds: How long it may be silent; the config's limit holds too if it is shorter.
    """
    (begun,) = begin_many(transaction, [rollout], worker_id, deadlines, lease_seconds)
    return begun


def begin_many(
    transaction: Transaction,
    rollouts: Sequence[Rollout],
    worker_id: str | None,
    deadlines: Deadlines,
    lease_seconds: float | None,
) -> list[AttemptedRollout]:
    """Make the next attempt of each rollout; as `begin`.

    Raises:
        StoreError: A rollout has ended.
    """
    begun = [_next_attempt(rollout, worker_id, transaction.now) for rollout in rollouts]
    transaction.run_many(
        "INSERT INTO attempts (rollout_id, attempt_id, sequence_id, status, start_time, worker_id,"
        " time_limit, lease_seconds, deadline) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [_attempt_values(rollout, deadlines, lease_seconds) for rollout in begun],
    )
    numbers = [rollout.attempt.sequence_id for rollout in begun]
    rollout_table.begin_attempts(transaction, list(zip(rollouts, numbers, strict=True)))
    if worker_id is not None and begun:
        last = begun[-1].attempt
        worker_table.assign(transaction, worker_id, last.rollout_id, last.attempt_id)
    return begun


def _next_attempt(rollout: Rollout, worker_id: str | None, now: float) -> AttemptedRollout:
    latest = rollout.attempt.sequence_id if isinstance(rollout, AttemptedRollout) else 0
    attempt = Attempt(
        rollout_id=rollout.rollout_id,
        attempt_id=new_id("at", 4),
        sequence_id=latest + 1,
        start_time=now,
        worker_id=worker_id,
    )
    fields = {name: getattr(rollout, name) for name in Rollout.model_fields}
    return AttemptedRollout(**fields | {"status": "preparing", "attempt": attempt})


def _attempt_values(
    rollout: AttemptedRollout, deadlines: Deadlines, lease_seconds: float | None
) -> tuple[Any, ...]:
    attempt, config = rollout.attempt, rollout.config
    silences = [s for s in (lease_seconds, config.unresponsive_seconds) if s is not None]
    silence = min(silences, default=deadlines.lease_seconds)
    timeout = config.timeout_seconds
    now = attempt.start_time
    limit = now + (deadlines.timeout_seconds if timeout is None else timeout)
    return (
        attempt.rollout_id,
        attempt.attempt_id,
        attempt.sequence_id,
        attempt.status,
        now,
        attempt.worker_id,
        limit,
        silence,
        min(limit, now + silence),
    )


def find(transaction: Transaction, rollout_id: str, attempt_id: str) -> Attempt:
    """Return an attempt, for "latest" that with the highest number.

    Raises:
        StoreError: Rollout or attempt not found.
    """
    if attempt_id == "latest":
        sql = "rollout_id = ? ORDER BY sequence_id DESC LIMIT 1"
        row = transaction.one(f"SELECT * FROM attempts WHERE {sql}", rollout_id)
    else:
        sql = "rollout_id = ? AND attempt_id = ?"
        row = transaction.one(f"SELECT * FROM attempts WHERE {sql}", rollout_id, attempt_id)
    if row is not None:
        return to_attempt(row)
    rollout_table.find(transaction, rollout_id)
    if attempt_id == "latest":
        raise StoreError(f"No attempts found for rollout {rollout_id}")
    raise StoreError(f"Attempt {attempt_id} not found for rollout {rollout_id}")


def show_life(
    transaction: Transaction, rollout_id: str, attempt_id: str, time: float | None = None
) -> None:
    """Note a sign of life: the lease begins anew, unless the attempt has ended.

    Args:
        transaction: In which.
        rollout_id: Of the attempt.
        attempt_id: Of the attempt.
        time: When it was by the clock of who says so, UTC epoch seconds; None for now. The lease
            runs by the store's clock.
    """
    transaction.run(
        "UPDATE attempts SET last_heartbeat_time = ?, deadline = CASE WHEN deadline IS NULL"
        " THEN NULL ELSE min(time_limit, ? + lease_seconds) END"
        " WHERE rollout_id = ? AND attempt_id = ?",
        transaction.now if time is None else time,
        transaction.now,
        rollout_id,
        attempt_id,
    )


def set_status(
    transaction: Transaction,
    rollout: Rollout,
    attempt: Attempt,
    status: AttemptStatus,
    failure_kind: FailureKind | None = None,
    failure_message: str | None = None,
) -> None:
    """Give an attempt a status, and its rollout what follows from it; nothing happens where the
    attempt has ended.

    Args:
        transaction: In which.
        rollout: As it is now, with its latest attempt.
        attempt: As it is now; not changed.
        status: What it shall be.
        failure_kind: Why it did not succeed.
        failure_message: The same in one sentence.

    Raises:
        StoreError: A live attempt cannot go there.
    """
    if status == attempt.status:
        return
    latest = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    is_latest = latest is not None and latest.attempt_id == attempt.attempt_id
    recoverable = may_recover(attempt.status, rollout.status, is_latest=is_latest)
    if not attempt_may_follow(attempt.status, status, recoverable=recoverable):
        if is_finished(attempt.status):
            return
        raise StoreError(
            f"Attempt {attempt.attempt_id} of rollout {attempt.rollout_id} cannot go from "
            f"{attempt.status} to {status}"
        )
    _write_status(transaction, attempt, status, failure_kind, failure_message)
    if is_latest:
        after = rollout_status(status, attempt.sequence_id, rollout.config)
        rollout_table.set_status(transaction, rollout.rollout_id, rollout.status, after)


def _end_live(
    transaction: Transaction,
    rollout_id: str,
    status: AttemptStatus,
    failure_kind: FailureKind | None,
    failure_message: str | None,
) -> None:
    """End every live attempt of a rollout whose own status has been decided."""
    for row in transaction.all(
        "SELECT * FROM attempts WHERE rollout_id = ? AND deadline IS NOT NULL", rollout_id
    ):
        _write_status(transaction, to_attempt(row), status, failure_kind, failure_message)


def _write_status(
    transaction: Transaction,
    attempt: Attempt,
    status: AttemptStatus,
    failure_kind: FailureKind | None,
    failure_message: str | None,
) -> None:
    live = is_running(status)
    transaction.run(
        "UPDATE attempts SET status = ?, end_time = ?, failure_kind = ?, failure_message = ?,"
        " deadline = CASE WHEN ? THEN min(time_limit, ? + lease_seconds) END"
        " WHERE rollout_id = ? AND attempt_id = ?",
        status,
        None if live else transaction.now,
        failure_kind,
        failure_message,
        live,
        transaction.now,
        attempt.rollout_id,
        attempt.attempt_id,
    )
    if attempt.worker_id is None:
        return
    if live:
        worker_table.assign(transaction, attempt.worker_id, attempt.rollout_id, attempt.attempt_id)
    else:
        silent = status == "unresponsive" or status == "timeout"
        without = "unknown" if silent else "idle"
        worker_table.release(transaction, attempt.worker_id, attempt.attempt_id, without)


@dataclass(frozen=True, slots=True)
class Change:
    """What shall become of an attempt."""

    status: AttemptStatus | None = None
    """Not applied where it has ended; a sign of life otherwise."""
    seen: float | None = None
    """When it last showed life, UTC epoch seconds."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """New `worker_id` and `metadata`."""
    failure: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """New `failure_kind` and `failure_message`; not applied where a status is not."""


def update(transaction: Transaction, rollout_id: str, attempt_id: str, change: Change) -> Attempt:
    """Change an attempt, for "latest" that with the highest number, and return it.

    Raises:
        StoreError: Rollout or attempt not found, or the status is unknown or cannot be reached.
    """
    if change.status is not None and change.status not in ATTEMPT_STATUSES:
        raise StoreError(f"Invalid attempt status: {change.status}")
    before = find(transaction, rollout_id, attempt_id)
    attempt_id = before.attempt_id
    _write_columns(transaction, before, change.columns)
    if change.seen is not None:
        show_life(transaction, rollout_id, attempt_id, change.seen)
    attempt = find(transaction, rollout_id, attempt_id)
    if change.status is not None:
        rollout = rollout_table.find(transaction, rollout_id)
        set_status(transaction, rollout, attempt, change.status)
        attempt = find(transaction, rollout_id, attempt_id)
        if is_running(attempt.status) and change.seen is None:
            show_life(transaction, rollout_id, attempt_id)
    if change.status is None or attempt.status != before.status:
        _write_columns(transaction, attempt, change.failure)
    return find(transaction, rollout_id, attempt_id)


def set_rollout_status(transaction: Transaction, rollout: Rollout, status: RolloutStatus) -> None:
    """Give a rollout a status by hand: an end also ends its live attempts, and so does another
    place in the queue.

    Raises:
        StoreError: The status is unknown, or the rollout cannot go there; to `preparing` and
            `running` not without a live attempt, as nobody would ever end it.
    """
    if status not in ROLLOUT_STATUSES:
        raise StoreError(f"Invalid rollout status: {status}")
    live = isinstance(rollout, AttemptedRollout) and is_running(rollout.attempt.status)
    if is_running(status) and is_queuing(rollout.status) and not live:
        raise StoreError(
            f"Rollout {rollout.rollout_id} cannot go from {rollout.status} to {status} by hand: "
            "nobody runs it; start_attempt begins an attempt"
        )
    rollout_table.set_status(transaction, rollout.rollout_id, rollout.status, status)
    if status == "succeeded":
        _end_live(transaction, rollout.rollout_id, status, None, None)
    elif status == "failed":
        message = "the rollout was set to failed"
        _end_live(transaction, rollout.rollout_id, status, None, message)
    elif status == "cancelled" or status == "requeuing":
        message = f"the rollout was set to {status}"
        kind = FailureKind.CANCELLED
        _end_live(transaction, rollout.rollout_id, "cancelled", kind, message)


def _write_columns(transaction: Transaction, attempt: Attempt, columns: Mapping[str, Any]) -> None:
    for column, value in columns.items():
        transaction.run(
            f"UPDATE attempts SET {column} = ? WHERE rollout_id = ? AND attempt_id = ?",
            value,
            attempt.rollout_id,
            attempt.attempt_id,
        )
    if "worker_id" not in columns or not is_running(attempt.status):
        return
    worker_id = columns["worker_id"]
    if attempt.worker_id is not None and attempt.worker_id != worker_id:
        worker_table.release(transaction, attempt.worker_id, attempt.attempt_id)
    if worker_id is not None:
        worker_table.assign(transaction, worker_id, attempt.rollout_id, attempt.attempt_id)
