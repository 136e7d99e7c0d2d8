"""Workers: what each runs, and when it was last heard of."""

from agl_core.errors import StoreError
from agl_core.store.database import Transaction
from agl_core.store.schema import to_worker
from agl_core.types.core import Worker, WorkerStatus


def find(transaction: Transaction, worker_id: str) -> Worker | None:
    """Return a worker, or None."""
    row = transaction.one("SELECT * FROM workers WHERE worker_id = ?", worker_id)
    return None if row is None else to_worker(row)


def require(transaction: Transaction, worker_id: str) -> Worker:
    """Return a worker that was seen before."""
    worker = find(transaction, worker_id)
    assert worker is not None, worker_id
    return worker


def assign(transaction: Transaction, worker_id: str, rollout_id: str, attempt_id: str) -> None:
    """Mark a worker, which may be new, as busy with an attempt."""
    _know(transaction, worker_id)
    transaction.run(
        "UPDATE workers SET status = 'busy', last_busy_time = ?, current_rollout_id = ?,"
        " current_attempt_id = ? WHERE worker_id = ?",
        transaction.now,
        rollout_id,
        attempt_id,
        worker_id,
    )


def record_dequeue(transaction: Transaction, worker_id: str, *, got_any: bool) -> None:
    """Note that a worker asked for work; if it got none it is idle, or busy with what it has."""
    _know(transaction, worker_id)
    transaction.run(
        "UPDATE workers SET last_dequeue_time = ? WHERE worker_id = ?", transaction.now, worker_id
    )
    if not got_any:
        _go_on(transaction, worker_id, "idle")


def release(
    transaction: Transaction, worker_id: str, attempt_id: str, without: WorkerStatus = "idle"
) -> None:
    """Note that a worker does not run an attempt any more.

    Args:
        transaction: In which.
        worker_id: Of the worker.
        attempt_id: What it ran, by now ended or another worker's.
        without: Its status if it has no other live attempt.
    """
    worker = find(transaction, worker_id)
    if worker is not None and worker.current_attempt_id == attempt_id:
        _go_on(transaction, worker_id, without)


def record_heartbeat(transaction: Transaction, worker_id: str, stats: str | None = None) -> None:
    """Note that a worker, which may be new, is alive, and what it says about itself as JSON."""
    _know(transaction, worker_id)
    transaction.run(
        "UPDATE workers SET last_heartbeat_time = ? WHERE worker_id = ?", transaction.now, worker_id
    )
    if stats is not None:
        transaction.run(
            "UPDATE workers SET heartbeat_stats = ? WHERE worker_id = ?",
            stats,
            worker_id,
        )


def _know(transaction: Transaction, worker_id: str) -> None:
    if not isinstance(worker_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(f"worker_id is {worker_id!r}; it is a text")
    transaction.run(
        "INSERT INTO workers (worker_id, status) VALUES (?, 'unknown')"
        " ON CONFLICT (worker_id) DO NOTHING",
        worker_id,
    )


def _go_on(transaction: Transaction, worker_id: str, without: WorkerStatus) -> None:
    """Point a worker to the newest of its live attempts; `without` is its status if it has none."""
    other = transaction.one(
        "SELECT rollout_id, attempt_id FROM attempts WHERE worker_id = ? AND deadline IS NOT NULL"
        " ORDER BY number DESC LIMIT 1",
        worker_id,
    )
    if other is None:
        _clear(transaction, worker_id, without)
    else:
        transaction.run(
            "UPDATE workers SET status = 'busy', current_rollout_id = ?, current_attempt_id = ?"
            " WHERE worker_id = ?",
            other["rollout_id"],
            other["attempt_id"],
            worker_id,
        )


def _clear(transaction: Transaction, worker_id: str, status: WorkerStatus) -> None:
    since = transaction.now if status == "idle" else None
    transaction.run(
        "UPDATE workers SET status = ?, current_rollout_id = NULL, current_attempt_id = NULL,"
        " last_idle_time = CASE WHEN status = 'idle' THEN last_idle_time"
        " ELSE coalesce(?, last_idle_time) END WHERE worker_id = ?",
        status,
        since,
        worker_id,
    )
