"""Leases: an attempt belongs to its worker until its deadline, which each sign of life puts off."""

from agl_core.store import attempt_table, rollout_table
from agl_core.store.database import Transaction
from agl_core.store.schema import to_attempt
from agl_core.store.status import may_recover
from agl_core.types.core import AttemptedRollout
from agl_core.types.outcome import FailureKind


def any_expired(transaction: Transaction) -> bool:
    """Tell whether an attempt is past its deadline."""
    first = transaction.value("SELECT min(deadline) FROM attempts WHERE deadline IS NOT NULL")
    return first is not None and first <= transaction.now


def expire(transaction: Transaction) -> int:
    """End the attempts that are past their deadlines and return how many."""
    rows = transaction.all(
        "SELECT * FROM attempts WHERE deadline <= ? ORDER BY deadline, number", transaction.now
    )
    for row in rows:
        attempt = to_attempt(row)
        rollout = rollout_table.find(transaction, attempt.rollout_id)
        if row["time_limit"] <= transaction.now:
            seconds = row["time_limit"] - attempt.start_time
            end, kind = "timeout", FailureKind.TIMEOUT
            message = f"no result within {seconds:g} s"
        else:
            end, kind = "unresponsive", FailureKind.INFRA_ERROR
            message = f"no sign of life from {attempt.worker_id} for {row['lease_seconds']:g} s"
        attempt_table.set_status(transaction, rollout, attempt, end, kind, message)
    return len(rows)


def renew(
    transaction: Transaction, rollout_id: str, attempt_id: str, worker_id: str | None = None
) -> bool:
    """Begin the lease of an attempt anew; False where it has to stop: it has ended, another one
    has been begun, or it is another worker's.

    Args:
        transaction: In which.
        rollout_id: Of the attempt.
        attempt_id: Of the attempt.
        worker_id: Who says so; an attempt without a worker becomes its. None for whoever has it.
    """
    if worker_id is not None and not _belongs(transaction, rollout_id, attempt_id, worker_id):
        return False
    renewed = transaction.run(
        "UPDATE attempts SET last_heartbeat_time = ?, deadline = min(time_limit, ? + lease_seconds)"
        " WHERE rollout_id = ? AND attempt_id = ? AND deadline IS NOT NULL"
        " AND sequence_id = (SELECT num_attempts FROM rollouts WHERE rollout_id = ?)",
        transaction.now,
        transaction.now,
        rollout_id,
        attempt_id,
        rollout_id,
    )
    return renewed > 0 or _recover(transaction, rollout_id, attempt_id)


def _belongs(transaction: Transaction, rollout_id: str, attempt_id: str, worker_id: str) -> bool:
    """Tell whether an attempt is a worker's, as one without a worker is from now on."""
    which = "rollout_id = ? AND attempt_id = ?"
    owner = transaction.one(f"SELECT worker_id FROM attempts WHERE {which}", rollout_id, attempt_id)
    if owner is None or owner["worker_id"] is not None:
        return owner is not None and owner["worker_id"] == worker_id
    transaction.run(
        f"UPDATE attempts SET worker_id = ? WHERE {which} AND deadline IS NOT NULL",
        worker_id,
        rollout_id,
        attempt_id,
    )
    return True


def _recover(transaction: Transaction, rollout_id: str, attempt_id: str) -> bool:
    """Let an attempt that was given up as silent go on, if it may."""
    found = rollout_table.find_many(transaction, [rollout_id])
    if not found or not isinstance(found[0], AttemptedRollout):
        return False
    attempt = found[0].attempt
    is_latest = attempt.attempt_id == attempt_id
    if not may_recover(attempt.status, found[0].status, is_latest=is_latest):
        return False
    attempt_table.set_status(transaction, found[0], attempt, "running")
    attempt_table.show_life(transaction, rollout_id, attempt_id)
    return True
