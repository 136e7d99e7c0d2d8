"""A runner process that is killed loses nothing: its leases expire and another one goes on."""

import asyncio
import multiprocessing
import os
import signal
import sqlite3
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from agl_core.emitter import find_final_reward
from agl_core.store import SqliteLightningStore
from agl_core.types.core import AttemptedRollout, RolloutConfig
from tests.agl_core.runner import worker_process
from tests.agl_core.runner.conftest import RESOURCES

SPAWN = multiprocessing.get_context("spawn")
RETRIED = RolloutConfig(
    unresponsive_seconds=1.5, max_attempts=3, retry_condition=["unresponsive"], timeout_seconds=60
)


async def queue(store: SqliteLightningStore, *, dawdles: int, others: int, **more: Any):
    await store.add_resources(RESOURCES)
    tasks = [{"number": n, "dawdles": n < dawdles, **more} for n in range(dawdles + others)]
    return [(await store.enqueue_rollout(t, config=RETRIED)).rollout_id for t in tasks]


async def wait_until(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.05)


def freeze(process: BaseProcess, path: Path) -> None:
    """Stop a process while it cannot be the one that writes: that one would lock out all others."""
    assert process.pid is not None
    with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        os.kill(process.pid, signal.SIGSTOP)
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
        connection.execute("ROLLBACK")


async def in_the_store(store: SqliteLightningStore, rollout_id: str) -> AttemptedRollout:
    found = await store.get_rollout_by_id(rollout_id)
    assert isinstance(found, AttemptedRollout)
    return found


async def test_another_runner_finishes_what_a_killed_one_had(tmp_path: Path):
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    ids = await queue(store, dawdles=2, others=6, seconds=600)
    runner = worker_process.make_runner(concurrency=2)
    victim = SPAWN.Process(target=worker_process.work, args=(runner, store, 1))
    victim.start()

    async def both_run() -> bool:
        spans = [await store.query_spans(rollout_id) for rollout_id in ids[:2]]
        return all(len(s) > 0 for s in spans)

    await wait_until(both_run)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    second = worker_process.make_runner(max_rollouts=8, concurrency=4)
    with second.run_context(agent=worker_process.agent, store=store, worker_id=2):
        await asyncio.wait_for(second.iter(), 60)
    for number, rollout_id in enumerate(ids):
        found = await in_the_store(store, rollout_id)
        assert (found.status, found.attempt.worker_id) == ("succeeded", "Worker-2")
        attempts = await store.query_attempts(rollout_id)
        expected = ["unresponsive", "succeeded"] if number < 2 else ["succeeded"]
        assert [attempt.status for attempt in attempts] == expected
        spans = await store.query_spans(rollout_id, "latest")
        assert find_final_reward(spans) == number
    lost = (await store.query_attempts(ids[0]))[0]
    assert lost.failure_message == "no sign of life from Worker-1 for 1.5 s"
    assert len(await store.query_spans(ids[0], lost.attempt_id)) == 1
    await store.close()


async def test_a_runner_that_was_frozen_reports_late_and_changes_nothing(tmp_path: Path):
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    (rollout_id,) = await queue(store, dawdles=1, others=0, seconds=3.0)
    process = SPAWN.Process(target=worker_process.work_and_say, args=(path, 1))
    process.start()
    assert process.pid is not None

    async def runs() -> bool:
        return len(await store.query_spans(rollout_id)) > 0

    await wait_until(runs)
    freeze(process, path)
    try:
        second = worker_process.make_runner(max_rollouts=1)
        with second.run_context(agent=worker_process.agent, store=store, worker_id=2):
            await asyncio.wait_for(second.iter(), 30)
        assert (await in_the_store(store, rollout_id)).status == "succeeded"
        os.kill(process.pid, signal.SIGCONT)
        first = (await store.query_attempts(rollout_id))[0]

        async def reported() -> bool:
            spans = await store.query_spans(rollout_id, first.attempt_id)
            return any(span.parent_id is None for span in spans)

        await wait_until(reported)
        await asyncio.sleep(0.5)
    finally:
        process.kill()
        process.join()
    found = await in_the_store(store, rollout_id)
    assert (found.status, found.attempt.worker_id) == ("succeeded", "Worker-2")
    attempts = await store.query_attempts(rollout_id)
    assert [attempt.status for attempt in attempts] == ["unresponsive", "succeeded"]
    await store.close()
