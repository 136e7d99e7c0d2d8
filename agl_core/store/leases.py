"""Leases: an attempt belongs to its worker until its deadline, which each sign of life puts off."""

from typing import cast

from agl_core.store import attempt_table, rollout_table
from agl_core.store.database import Transaction
from agl_core.store.schema import to_attempt
from agl_core.store.status import is_running, may_recover
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


def renew(transaction: Transaction, rollout_id: str, attempt_id: str) -> AttemptedRollout | None:
    """Begin the lease of an attempt anew and return it with its rollout; None where it has to stop:
    it has ended, or another one has been begun.
    """
    found = rollout_table.find_many(transaction, [rollout_id])
    if not found or not isinstance(found[0], AttemptedRollout):
        return None
    rollout = found[0]
    attempt = rollout.attempt
    if attempt.attempt_id != attempt_id:
        return None
    if may_recover(attempt.status, rollout.status, is_latest=True):
        attempt_table.set_status(transaction, rollout, attempt, "running")
    elif not is_running(attempt.status):
        return None
    attempt_table.show_life(transaction, rollout_id, attempt_id)
    (rollout,) = rollout_table.find_many(transaction, [rollout_id])
    return cast(AttemptedRollout, rollout)
