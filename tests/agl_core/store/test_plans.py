"""What is asked often is looked up by an index, whatever else the store holds: no scan, and no
sort but of what was asked for.
"""

import re
import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.types.core import EnqueueRolloutRequest
from tests.agl_core.store.builders import begin, make_resources, make_span, take
from tests.agl_core.store.conftest import OpenStore

pytestmark = pytest.mark.in_process

Call = Callable[[Store, str], Coroutine[Any, Any, Any]]


def plans_of(store: Store, statements: list[str]) -> list[str]:
    """Return the steps of the plans of statements, each with its statement."""
    connection = store._database._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    steps: list[str] = []
    for statement in statements:
        if not re.match(r"(SELECT|UPDATE|DELETE|INSERT)", statement):
            continue
        for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall():
            steps.append(f"{row['detail']}   <- {statement}")
    return steps


CALLS: dict[str, Call] = {
    "enqueue": lambda store, _: store.enqueue_rollout("task", idempotency_key="new"),
    "dequeue": lambda store, _: store.dequeue_rollout("w", idempotency_key="new"),
    "start": lambda store, _: store.start_rollout("task", worker_id="w"),
    "start attempt": lambda store, rollout: store.start_attempt(rollout, "w"),
    "get": lambda store, rollout: store.get_rollout_by_id(rollout),
    "by status": lambda store, _: store.query_rollouts(status_in=["running", "failed"], limit=5),
    "by id": lambda store, rollout: store.query_rollouts(rollout_id_in=[rollout]),
    "requeue": lambda store, rollout: store.update_rollout(rollout, status="requeuing"),
    "end": lambda store, rollout: store.update_attempt(rollout, "latest", status="failed"),
    "wait": lambda store, rollout: store.wait_for_rollouts(rollout_ids=[rollout], timeout=0),
    "attempts": lambda store, rollout: store.query_attempts(rollout),
    "latest attempt": lambda store, rollout: store.get_latest_attempt(rollout),
    "spans": lambda store, rollout: store.query_spans(rollout),
    "named spans": lambda store, rollout: store.query_spans(rollout, "latest", name="a"),
    "sequence ids": lambda store, rollout: store.get_many_span_sequence_ids([(rollout, "")] * 9),
    "heartbeat": lambda store, _: store.update_worker("w"),
    "resources": lambda store, _: store.get_latest_resources(),
    "add resources": lambda store, _: store.add_resources(make_resources(), idempotency_key="new"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_calls_look_up_by_index(open_store: OpenStore, name: str):
    store = open_store(scan_debounce_seconds=3600)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(5)])
    taken = await take(store, "w")
    await store.add_span(make_span(taken))
    connection = store._database._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    await CALLS[name](store, taken.rollout_id)
    connection.set_trace_callback(None)
    steps = plans_of(store, statements)
    assert steps
    scans = [step for step in steps if step.startswith("SCAN") and not allowed(step)]
    assert scans == []


def allowed(step: str) -> bool:
    # json_each: the values that were asked for. An index read from an end stops at the first row.
    ends = (
        "rollouts USING INDEX rollouts_in_queue",
        "resources USING INDEX",
        "resources USING COV",
    )
    return "json_each" in step.split("<-")[0] or any(end in step for end in ends)


async def test_the_watchdog_and_spans_look_up_by_index(open_store: OpenStore):
    store = open_store(scan_debounce_seconds=3600)
    taken = await begin(store)
    connection = store._database._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    await store.add_many_spans([make_span(taken, n) for n in range(3)])
    store._scan()  # pyright: ignore[reportPrivateUsage]
    await store.renew_leases("w", [(taken.rollout_id, taken.attempt.attempt_id)])
    connection.set_trace_callback(None)
    steps = plans_of(store, statements)
    assert [step for step in steps if step.startswith("SCAN") and not allowed(step)] == []


async def test_a_query_takes_the_same_statements_however_many_rollouts_match(
    open_store: OpenStore,
):
    store = open_store(scan_debounce_seconds=3600)

    async def count(rollouts: int) -> int:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(rollouts)])
        await store.dequeue_many_rollouts(limit=rollouts)
        connection = store._database._connection  # pyright: ignore[reportPrivateUsage]
        assert isinstance(connection, sqlite3.Connection)
        statements: list[str] = []
        connection.set_trace_callback(statements.append)
        await store.query_rollouts(status_in=["preparing"])
        connection.set_trace_callback(None)
        return len(statements)

    assert await count(1) == await count(50)
