"""One store for several event loops, threads and processes."""

import asyncio
import json
import multiprocessing
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from agl_core.errors import StoreError, TransientError
from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.store import (
    InMemoryLightningStore,
    LightningStoreThreaded,
    SqliteLightningStore,
    schema,
)
from agl_core.store import database as database_module
from agl_core.store.base import LightningStore
from agl_core.types.core import EnqueueRolloutRequest, Rollout
from tests.agl_core.store.builders import begin, make_span, take
from tests.agl_core.store.conftest import OpenStore

THREADS = 4


async def work(store: LightningStore, worker_id: str) -> list[str]:
    """Take rollouts until there are none; return the ids of the attempts."""
    attempts: list[str] = []
    while (taken := await store.dequeue_rollout(worker_id)) is not None:
        await store.add_many_spans([make_span(taken, number) for number in (1, 2)])
        await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="succeeded")
        attempts.append(f"{taken.rollout_id}/{taken.attempt.attempt_id}")
    return attempts


def test_a_store_outlives_the_event_loop_it_was_used_in(open_store: OpenStore):
    store = open_store()
    taken = asyncio.run(begin(store))
    asyncio.run(store.add_span(make_span(taken)))

    async def end_and_wait() -> int:
        async with asyncio.TaskGroup() as group:
            wait = group.create_task(store.wait_for_rollouts(rollout_ids=[taken.rollout_id]))
            await asyncio.sleep(0.01)
            await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
        return len(wait.result())

    assert asyncio.run(end_and_wait()) == 1


def test_a_wait_whose_event_loop_is_gone_disturbs_nobody(open_store: OpenStore):
    store = open_store()
    taken = asyncio.run(begin(store))
    loop = asyncio.new_event_loop()
    task = loop.create_task(store.wait_for_rollouts(rollout_ids=[taken.rollout_id]))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    asyncio.run(_ignore(store.update_rollout(taken.rollout_id, status="succeeded")))
    del task


def test_threads_share_a_queue_and_nothing_is_taken_twice(open_store: OpenStore):
    store = open_store()
    requests = [EnqueueRolloutRequest(input=number) for number in range(80)]
    asyncio.run(_ignore(store.enqueue_many_rollouts(requests)))
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(lambda n: asyncio.run(work(store, f"w{n}")), range(THREADS))
    attempts = [attempt for taken in results for attempt in taken]
    assert len(attempts) == len(set(attempts)) == 80

    async def counts() -> tuple[object, ...]:
        found = await store.statistics()
        done = await store.query_rollouts(status_in=["succeeded"], limit=0)
        return found.get("total_attempts"), found.get("total_spans"), done.total

    assert asyncio.run(counts()) == (80, 160, 80)


async def _ignore(call: object) -> None:
    await call  # pyright: ignore[reportGeneralTypeIssues]


async def test_sequence_ids_are_unique_among_threads(open_store: OpenStore):
    store = open_store()
    taken = await begin(store)
    pair = (taken.rollout_id, taken.attempt.attempt_id)

    def draw(_: int) -> list[int]:
        return [asyncio.run(store.get_next_span_sequence_id(*pair)) for _ in range(25)]

    with ThreadPoolExecutor(THREADS) as pool:
        drawn = [n for numbers in pool.map(draw, range(THREADS)) for n in numbers]
    assert sorted(drawn) == list(range(1, 25 * THREADS + 1))


# What takes long.


@pytest.mark.in_process
async def test_work_in_bulk_is_done_by_another_thread(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
):
    threads: set[int] = set()
    to_rollout = schema.to_rollout

    def clock() -> float:
        threads.add(threading.get_ident())
        return time.time()

    def read(row: sqlite3.Row) -> Rollout:
        threads.add(threading.get_ident())
        return to_rollout(row)

    async def ran_in(call: Awaitable[object]) -> set[int]:
        threads.clear()
        await call
        return set(threads)

    store = open_store(clock=clock, scan_debounce_seconds=3600)
    requests = [EnqueueRolloutRequest(input=number) for number in range(2000)]
    here = {threading.get_ident()}
    assert await ran_in(store.enqueue_many_rollouts(requests[:1])) == here
    taken = await take(store)
    spans = [make_span(taken, number) for number in range(2000)]
    assert here.isdisjoint(await ran_in(store.enqueue_many_rollouts(requests)))
    assert here.isdisjoint(await ran_in(store.dequeue_many_rollouts(limit=2000)))
    assert here.isdisjoint(await ran_in(store.add_many_spans(spans)))
    monkeypatch.setattr(schema, "to_rollout", read)
    assert len(await ran_in(store.query_rollouts()) - here) == 1


@pytest.mark.in_process
async def test_json_is_made_before_the_transaction(open_store: OpenStore):
    store = open_store(scan_debounce_seconds=3600)
    database = store._database  # pyright: ignore[reportPrivateUsage]
    seen: list[bool] = []

    class Looks:
        def tolist(self) -> list[int]:
            connection = database._connection  # pyright: ignore[reportPrivateUsage]
            assert connection is not None
            seen.append(connection.in_transaction)
            return [1]

    await store.enqueue_rollout(Looks())
    started = await store.start_rollout(Looks(), metadata={"a": Looks()})
    await store.update_rollout(started.rollout_id, input=Looks())
    await store.update_worker("w", {"a": Looks()})
    assert seen == [False] * 5


# Several processes on one file.

WORKER = """
import asyncio, json, sys
from agl_core.store import SqliteLightningStore
from tests.agl_core.store.test_concurrency import work

async def main():
    store = SqliteLightningStore(sys.argv[1])
    sys.stdin.readline()
    print(json.dumps(await work(store, sys.argv[2])))
    await store.close()

asyncio.run(main())
"""


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def on_disk(path: Path) -> AsyncGenerator[SqliteLightningStore]:
    store = SqliteLightningStore(path, scan_debounce_seconds=0.1)
    yield store
    await store.close()


def start_worker(path: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )


async def test_processes_share_a_queue_and_nothing_is_taken_twice(
    on_disk: SqliteLightningStore, path: Path
):
    requests = [EnqueueRolloutRequest(input=number) for number in range(150)]
    queued = await on_disk.enqueue_many_rollouts(requests)
    workers = [start_worker(path, f"w{number}") for number in range(3)]
    attempts: list[str] = []
    waiting = asyncio.create_task(
        on_disk.wait_for_rollouts(rollout_ids=[r.rollout_id for r in queued], timeout=60)
    )
    await asyncio.sleep(0)

    def let_work() -> None:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        for worker in workers:
            out, _ = worker.communicate(timeout=60)
            assert worker.returncode == 0
            attempts.extend(json.loads(out))

    await asyncio.to_thread(let_work)
    assert len(attempts) == len(set(attempts)) == 150
    # Ended elsewhere: seen by the scans, each 0.1 s, not when the limit of 60 s is over.
    ended = time.monotonic()
    assert len(await waiting) == 150
    assert time.monotonic() - ended < 10
    assert (await on_disk.statistics()).get("total_spans") == 300


async def test_an_end_elsewhere_in_the_middle_of_a_scan_is_not_missed(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = SqliteLightningStore(path, scan_debounce_seconds=3600)
    other = SqliteLightningStore(path, scan_debounce_seconds=3600)
    started = await store.start_rollout("task")
    store._scan()  # pyright: ignore[reportPrivateUsage]
    database = store._database  # pyright: ignore[reportPrivateUsage]
    look, loop = database.version, asyncio.get_running_loop()
    waits: list[Future[list[Rollout]]] = []

    def wait_and_end_first() -> tuple[int, int]:
        call = store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=60)
        waits.append(asyncio.run_coroutine_threadsafe(call, loop))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        asyncio.run(_ignore(other.update_rollout(started.rollout_id, status="succeeded")))
        return look()

    with monkeypatch.context() as patch:
        patch.setattr(database, "version", wait_and_end_first)
        await asyncio.to_thread(store._scan)  # pyright: ignore[reportPrivateUsage]
    await asyncio.to_thread(store._scan)  # pyright: ignore[reportPrivateUsage]
    (rollout,) = await asyncio.wait_for(asyncio.wrap_future(waits[0]), 5)
    assert rollout.status == "succeeded"
    await store.close()
    await other.close()


async def test_processes_may_make_the_file_at_the_same_moment(path: Path):
    workers = [start_worker(path, f"w{number}") for number in range(3)]
    for worker in workers:
        out, _ = await asyncio.to_thread(worker.communicate, "\n", 60)
        assert (worker.returncode, out) == (0, "[]\n")


async def test_a_pickled_store_opens_the_same_file(on_disk: SqliteLightningStore):
    assert on_disk.capabilities.get("zero_copy") is True
    other: SqliteLightningStore = pickle.loads(pickle.dumps(on_disk))
    queued = await on_disk.enqueue_rollout("task")
    assert (await take(other)).rollout_id == queued.rollout_id
    run_ids = {(await store.statistics()).get("run_id") for store in (on_disk, other)}
    assert len(run_ids) == 1
    await other.close()


def _in_child(store: Store, answers: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        answers.put(asyncio.run(store.enqueue_rollout("child")).rollout_id)
    except ValueError as error:
        answers.put(f"refused: {error}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
async def test_a_forked_process_opens_the_file_again(open_store: OpenStore):
    store = open_store()
    await begin(store)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_in_child, args=(store, answers))
    process.start()
    answer: str = await asyncio.to_thread(answers.get)
    process.join()
    if isinstance(store, InMemoryLightningStore):
        assert "lives in the memory of process" in answer
    else:
        assert (await take(store)).rollout_id == answer


async def test_a_file_held_by_another_process_for_too_long_is_worth_another_try(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.1)
    store = SqliteLightningStore(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(TransientError, match=r"another process writes to it .* within 0\.1 s"):
        await store.enqueue_rollout("task")
    holder.execute("COMMIT")
    holder.close()
    await store.enqueue_rollout("task")
    await store.close()


async def test_a_file_that_is_no_store_is_refused(tmp_path: Path):
    path = tmp_path / "text.db"
    path.write_text("no database at all" * 100)
    with pytest.raises(ValueError, match="cannot be opened as a store"):
        SqliteLightningStore(path)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE mine (a)")
    other.close()
    with pytest.raises(ValueError, match="has tables of version 0"):
        SqliteLightningStore(tmp_path / "other.db")


# A store that is not thread-safe.


class OneLoopOnly(InMemoryLightningStore):
    """Refuses every other thread than the first, and waits inside a call."""

    thread: int | None = None

    @property
    def capabilities(self):
        return {**super().capabilities, "thread_safe": False}

    async def dequeue_rollout(self, *args: object, **kwargs: object):
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident()
        await asyncio.sleep(0.25)
        return await super().dequeue_rollout(*args, **kwargs)  # pyright: ignore[reportArgumentType]


def test_the_threaded_store_keeps_calls_in_one_loop_without_holding_a_lock():
    store = LightningStoreThreaded(OneLoopOnly())
    assert store.capabilities.get("thread_safe") is True
    requests = [EnqueueRolloutRequest(input=number) for number in range(8)]
    asyncio.run(_ignore(store.enqueue_many_rollouts(requests)))
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: asyncio.run(store.dequeue_rollout()), range(8)))
    assert time.monotonic() - started < 8 * 0.25
    assert len({rollout.rollout_id for rollout in taken if rollout}) == 8
    asyncio.run(store.close())
    asyncio.run(store.close())


class WaitsForEver(LightningStore):
    async def wait_for_rollouts(self, **arguments: object) -> list[Rollout]:
        del arguments
        await asyncio.Event().wait()
        return []

    async def close(self) -> None: ...


async def test_a_threaded_store_that_closes_ends_what_still_waits_and_refuses_later_calls():
    store = LightningStoreThreaded(WaitsForEver())
    wait = asyncio.create_task(store.wait_for_rollouts(rollout_ids=["ro-0"]))
    await asyncio.sleep(0.05)
    await store.close()
    for call in (wait, store.wait_for_rollouts(rollout_ids=["ro-0"])):
        with pytest.raises(StoreError, match="closed"):
            await asyncio.wait_for(call, 5)


async def test_a_caller_of_a_threaded_store_may_cancel_its_own_call():
    store = LightningStoreThreaded(WaitsForEver())
    wait = asyncio.create_task(store.wait_for_rollouts(rollout_ids=["ro-0"]))
    await asyncio.sleep(0.05)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    await store.close()


def test_the_threaded_store_passes_a_thread_safe_one_through(open_store: OpenStore):
    inner = open_store()
    before = threading.active_count()
    store = LightningStoreThreaded(inner)
    assert threading.active_count() == before
    queued = asyncio.run(store.enqueue_rollout("task"))
    assert asyncio.run(inner.get_rollout_by_id(queued.rollout_id)) == queued
    assert store.capabilities.get("zero_copy") == inner.capabilities.get("zero_copy")
