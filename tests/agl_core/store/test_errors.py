"""What fails is a `StoreError` with one sentence, or a `TransientError`; never SQLite's own."""

import math
import sqlite3
from pathlib import Path

import pytest

from agl_core.errors import StoreError, TransientError
from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.store import SqliteLightningStore
from tests.agl_core.store.builders import begin, make_span, take


@pytest.mark.parametrize("seconds", [math.nan, 0.0, -1.0])
async def test_a_lease_is_above_zero(store: Store, seconds: float):
    await store.enqueue_rollout("task")
    with pytest.raises(StoreError, match=r"lease_seconds is .* above 0"):
        await store.dequeue_many_rollouts(lease_seconds=seconds)
    await take(store)


async def test_a_number_of_more_than_64_bits_is_refused(store: Store):
    with pytest.raises(StoreError, match=r"64 bits|is not from"):
        await store.query_rollouts(limit=2**70)
    with pytest.raises(StoreError, match=r"64 bits|is not from"):
        await store.dequeue_many_rollouts(limit=2**70)


async def test_a_heartbeat_has_a_time(store: Store):
    taken = await begin(store)
    with pytest.raises(StoreError, match="last_heartbeat_time is nan"):
        await store.update_attempt(taken.rollout_id, "latest", last_heartbeat_time=math.nan)


@pytest.mark.in_process
async def test_a_worker_has_a_name(store: Store):
    with pytest.raises(StoreError, match="worker_id is None; it is a text"):
        await store.update_worker(None)  # pyright: ignore[reportArgumentType]
    assert (await store.query_workers()).total == 0


async def test_a_span_holds_what_json_has_a_form_for(store: Store):
    taken = await begin(store)
    for value in (b"abc", {1, 2}, 2**70):
        with pytest.raises(StoreError, match=r"span .* cannot be kept as JSON"):
            await store.add_span(make_span(taken, attributes={"value": value}))
    assert (await store.query_spans(taken.rollout_id)).total == 0


@pytest.mark.in_process
async def test_a_text_that_is_no_unicode_is_refused(store: Store):
    taken = await begin(store)
    with pytest.raises(StoreError, match="a text cannot be kept"):
        await store.add_span(make_span(taken, name="\ud800"))


@pytest.mark.in_process
async def test_what_sqlite_cannot_bind_is_refused(store: Store):
    with pytest.raises(StoreError, match="not supported"):
        await store.query_attempts({})  # pyright: ignore[reportArgumentType]


async def test_a_full_disk_is_worth_another_try(tmp_path: Path):
    store = SqliteLightningStore(tmp_path / "store.db")
    connection = store._database._connection  # pyright: ignore[reportPrivateUsage]
    assert isinstance(connection, sqlite3.Connection)
    connection.execute("PRAGMA max_page_count = 1")  # the pages there are, and no more
    with pytest.raises(TransientError, match="full"):
        await store.enqueue_rollout("x" * 1_000_000)
    connection.execute("PRAGMA max_page_count = 100000")
    await store.enqueue_rollout("x" * 1_000_000)
    assert (await store.query_rollouts()).total == 1
    await store.close()
