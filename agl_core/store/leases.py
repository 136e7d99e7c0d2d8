"""Leases: an attempt belongs to its worker until its deadline, which each sign of life puts off."""

from collections.abc import Sequence

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
    rows = transaction.all("SELECT * FROM attempts WHERE deadline <= ?", transaction.now)
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


def renew(transaction: Transaction, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Renew the leases of attempts, by rollout id and attempt id; return the ids of those that have
    to stop.
    """
    stop: list[str] = []
    for rollout_id, attempt_id in pairs:
        row = transaction.one(
            "SELECT a.status, a.sequence_id = r.num_attempts AS is_latest, r.status AS rollout"
            " FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id"
            " WHERE a.rollout_id = ? AND a.attempt_id = ?",
            rollout_id,
            attempt_id,
        )
        if row is not None and may_recover(row["status"], row["rollout"], is_latest=True):
            attempt = attempt_table.find(transaction, rollout_id, attempt_id)
            attempt_table.set_status(
                transaction, rollout_table.find(transaction, rollout_id), attempt, "running"
            )
        elif row is None or not row["is_latest"] or not is_running(row["status"]):
            stop.append(attempt_id)
            continue
        attempt_table.show_life(transaction, rollout_id, attempt_id)
    return stop


def still_running(
    transaction: Transaction, pairs: Sequence[Sequence[str]]
) -> list[AttemptedRollout]:
    """Return those of some attempts, by rollout id and attempt id, that run, each with its rollout;
    being asked for is a sign of life.
    """
    running: list[AttemptedRollout] = []
    for rollout_id, attempt_id in pairs:
        rollout = rollout_table.find(transaction, rollout_id)
        if (
            isinstance(rollout, AttemptedRollout)
            and rollout.attempt.attempt_id == attempt_id
            and is_running(rollout.attempt.status)
        ):
            attempt_table.show_life(transaction, rollout_id, attempt_id)
            running.append(rollout)
    return running
