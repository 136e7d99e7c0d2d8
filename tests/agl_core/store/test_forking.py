"""Processes that are forked while a store is in use."""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agl_core.errors import StoreError
from agl_core.store import SqliteLightningStore
from agl_core.store.database import MEMORY, Database
from agl_core.store.forking import fork_safe_lock

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]
FORK = multiprocessing.get_context("fork")
CHILDREN, CALLS = 3, 20


def _enqueue(store: SqliteLightningStore, told: "multiprocessing.SimpleQueue[list[str]]") -> None:
    async def enqueue() -> list[str]:
        return [(await store.enqueue_rollout(n)).rollout_id for n in range(CALLS)]

    told.put(asyncio.run(enqueue()))


@contextmanager
def busy(*databases: Database) -> Iterator[None]:
    """Use databases in threads while the block runs."""
    over = threading.Event()

    def use(database: Database) -> None:
        while not over.is_set():
            with database.write() as transaction:
                transaction.run("UPDATE meta SET value = value")
            time.sleep(0.0005)

    threads = [threading.Thread(target=use, args=(one,)) for one in databases]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


async def test_what_forked_processes_and_their_parent_write_at_once_is_all_kept(tmp_path: Path):
    store = SqliteLightningStore(tmp_path / "store.db")
    returned = [(await store.enqueue_rollout("before")).rollout_id]
    told = FORK.SimpleQueue()
    with busy(store._database, Database(str(tmp_path / "store.db")), Database(MEMORY)):
        for _ in range(CHILDREN):
            process = FORK.Process(target=_enqueue, args=(store, told), daemon=True)
            process.start()
            returned.append((await store.enqueue_rollout("parent")).rollout_id)
        for _ in range(CHILDREN):
            returned += await asyncio.wait_for(asyncio.to_thread(told.get), 60)
    kept = {one.rollout_id for one in await store.query_rollouts()}
    assert len(kept) == 1 + CHILDREN * (1 + CALLS)
    assert kept == set(returned)
    await store.close()


def _write(database: Database) -> None:
    with database.write() as transaction:
        transaction.run("UPDATE meta SET value = 'the child'")


def test_a_child_of_a_process_with_open_databases_waits_for_no_lock(tmp_path: Path):
    database = Database(str(tmp_path / "store.db"))
    others = [Database(str(tmp_path / f"{n}.db")) for n in range(3)]
    with busy(database, *others):
        for _ in range(20):
            child = FORK.Process(target=_write, args=(others[0],), daemon=True)
            child.start()
            child.join(30)
            assert child.exitcode == 0


def test_another_version_is_told_after_a_fork_and_after_a_change_elsewhere(tmp_path: Path):
    database, other = (Database(str(tmp_path / "store.db")) for _ in range(2))
    seen = [database.version()]
    assert database.version() == seen[0]
    _write(other)
    seen.append(database.version())
    os.waitpid(_forked(), 0)
    seen.append(database.version())
    assert len(set(seen)) == 3
    _write(database)
    assert database.version() == seen[-1]


def _forked() -> int:
    if (pid := os.fork()) == 0:
        os._exit(0)
    return pid


def test_a_file_that_is_gone_after_a_fork_is_not_made_anew(tmp_path: Path):
    database = Database(str(tmp_path / "store.db"))
    os.waitpid(_forked(), 0)
    (tmp_path / "store.db").unlink()
    with pytest.raises(StoreError, match=r"store\.db cannot be opened as a store: unable to open"):
        _write(database)


def test_a_lock_that_another_thread_holds_is_free_in_a_child():
    lock = fork_safe_lock()
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait(0.5)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    child = FORK.Process(target=_take, args=(lock,), daemon=True)
    child.start()
    child.join(10)
    assert child.exitcode == 0
    assert lock.acquire(timeout=1)
    lock.release()
    holder.join()


def _take(lock: "threading.RLock") -> None:
    with lock:
        pass
