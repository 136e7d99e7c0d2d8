"""Tables of a store, and rows as records.

The queue is a column of the rollouts (`queue_number`, null outside of it), so that taking a
rollout and making its attempt is one transaction. An attempt that has not ended has a `deadline`,
the earlier of its time limit and the end of its lease (infinite where it has neither); one that has
ended has none. Values without a fixed form are JSON text.
"""

import sqlite3
from collections.abc import Callable
from typing import Any

from agl_core.errors import StoreError
from agl_core.store.json_text import decode, encode
from agl_core.types.core import Attempt, AttemptedRollout, Rollout, Worker
from agl_core.types.resources import ResourcesUpdate
from agl_core.types.tracer import Span

SCHEMA_VERSION = 1
MAX_SEQUENCE_ID = 2**53
"""Highest sequence id of a span that is taken; the next ones have to fit in SQLite too."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    queue_number INTEGER,
    num_attempts INTEGER NOT NULL DEFAULT 0,
    next_span_sequence_id INTEGER NOT NULL DEFAULT 1,
    start_time REAL NOT NULL,
    end_time REAL,
    mode TEXT,
    resources_id TEXT,
    config TEXT NOT NULL,
    metadata TEXT,
    input TEXT NOT NULL
);
CREATE INDEX rollouts_by_status ON rollouts (status);
CREATE INDEX rollouts_in_queue ON rollouts (queue_number) WHERE queue_number IS NOT NULL;

CREATE TABLE attempts (
    number INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    status TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,
    worker_id TEXT,
    last_heartbeat_time REAL,
    time_limit REAL NOT NULL,
    lease_seconds REAL NOT NULL,
    deadline REAL,
    failure_kind TEXT,
    failure_message TEXT,
    metadata TEXT,
    UNIQUE (rollout_id, attempt_id),
    UNIQUE (rollout_id, sequence_id)
);
CREATE INDEX attempts_by_deadline ON attempts (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX live_attempts_by_worker ON attempts (worker_id) WHERE deadline IS NOT NULL;

CREATE TABLE spans (
    number INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    trace_id TEXT NOT NULL,
    span_id TEXT NOT NULL,
    parent_id TEXT,
    name TEXT NOT NULL,
    start_time REAL,
    end_time REAL,
    size_bytes INTEGER NOT NULL,
    attributes TEXT NOT NULL,
    rest TEXT NOT NULL,
    UNIQUE (rollout_id, attempt_id, span_id)
);
CREATE INDEX spans_in_order ON spans (rollout_id, sequence_id);

CREATE TABLE resources (
    resources_id TEXT PRIMARY KEY,
    publication INTEGER NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    create_time REAL NOT NULL,
    update_time REAL NOT NULL,
    resources TEXT NOT NULL
);

CREATE TABLE workers (
    worker_id TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    heartbeat_stats TEXT,
    last_heartbeat_time REAL,
    last_dequeue_time REAL,
    last_busy_time REAL,
    last_idle_time REAL,
    current_rollout_id TEXT,
    current_attempt_id TEXT
);

CREATE TABLE answers (
    operation TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    time REAL NOT NULL,
    ids TEXT NOT NULL,
    PRIMARY KEY (operation, idempotency_key)
) WITHOUT ROWID;
CREATE INDEX answers_by_time ON answers (time);
"""

ROLLOUT_FIELDS = ("rollout_id", "status", "start_time", "end_time", "mode", "resources_id")
ATTEMPT_FIELDS = (
    "rollout_id",
    "attempt_id",
    "sequence_id",
    "status",
    "start_time",
    "end_time",
    "worker_id",
    "last_heartbeat_time",
    "failure_kind",
    "failure_message",
)
SPAN_FIELDS = (
    "rollout_id",
    "attempt_id",
    "sequence_id",
    "trace_id",
    "span_id",
    "parent_id",
    "name",
    "start_time",
    "end_time",
)
RESOURCES_FIELDS = ("resources_id", "version", "create_time", "update_time")
WORKER_FIELDS = (
    "worker_id",
    "status",
    "last_heartbeat_time",
    "last_dequeue_time",
    "last_busy_time",
    "last_idle_time",
    "current_rollout_id",
    "current_attempt_id",
)

_ATTEMPT_COLUMNS = ", ".join(f'a.{name} AS "a.{name}"' for name in (*ATTEMPT_FIELDS, "metadata"))
SELECT_ROLLOUTS = (
    f"SELECT r.*, {_ATTEMPT_COLUMNS} FROM rollouts r LEFT JOIN attempts a"
    " ON a.rollout_id = r.rollout_id AND a.sequence_id = r.num_attempts"
)
"""Rollouts, each with its latest attempt."""


def to_attempt(row: sqlite3.Row, prefix: str = "") -> Attempt:
    """Return an attempt from a row; `prefix` is that of its columns."""
    fields = {name: row[prefix + name] for name in ATTEMPT_FIELDS}
    return Attempt(**fields, metadata=decode_or_none(row[prefix + "metadata"]))


def to_rollout(row: sqlite3.Row) -> Rollout | AttemptedRollout:
    """Return a rollout from a row of `SELECT_ROLLOUTS`."""
    fields: dict[str, Any] = {name: row[name] for name in ROLLOUT_FIELDS}
    fields["input"] = decode(row["input"])
    fields["config"] = decode(row["config"])
    fields["metadata"] = decode_or_none(row["metadata"])
    if row["a.attempt_id"] is None:
        return Rollout(**fields)
    return AttemptedRollout(**fields, attempt=to_attempt(row, "a."))


def to_resources(row: sqlite3.Row) -> ResourcesUpdate:
    """Return resources from a row."""
    fields: dict[str, Any] = {name: row[name] for name in RESOURCES_FIELDS}
    return ResourcesUpdate(**fields, resources=decode(row["resources"]))


def to_worker(row: sqlite3.Row) -> Worker:
    """Return a worker from a row."""
    fields: dict[str, Any] = {name: row[name] for name in WORKER_FIELDS}
    return Worker(**fields, heartbeat_stats=decode_or_none(row["heartbeat_stats"]))


def to_span(row: sqlite3.Row) -> Span:
    """Return a span from a row."""
    fields: dict[str, Any] = {name: row[name] for name in SPAN_FIELDS}
    return Span(**fields, attributes=decode(row["attributes"]), **decode(row["rest"]))


def span_values(span: Span, size: Callable[[Span], int] | None = None) -> tuple[Any, ...]:
    """Return the columns of a span: `SPAN_FIELDS`, `size_bytes`, `attributes`, `rest`.

    Args:
        span: What is to be kept.
        size: Returns its bytes; None for the length of its JSON.

    Raises:
        StoreError: A value has no form in JSON, or the sequence id is too high to count on.
    """
    if span.sequence_id > MAX_SEQUENCE_ID:
        raise StoreError(f"sequence_id is {span.sequence_id}, above {MAX_SEQUENCE_ID}")
    what = f"span {span.span_id} of rollout {span.rollout_id}"
    others = span.model_dump(exclude={*SPAN_FIELDS, "attributes"})
    rest = {name: value for name, value in others.items() if value is not None}
    texts = encode(span.attributes, what), encode(rest, what)
    size_bytes = sum(map(len, texts)) if size is None else size(span)
    return (*(getattr(span, name) for name in SPAN_FIELDS), size_bytes, *texts)


def encode_or_none(value: Any, what: str) -> str | None:
    """Return a value as JSON text, and None as it is."""
    return None if value is None else encode(value, what)


def decode_or_none(text: str | None) -> Any:
    """Return the value of a text by `encode_or_none`."""
    return None if text is None else decode(text)
