"""Leases are kept while agents run, whatever else is switched off."""

import asyncio
import threading
import time

import pytest

from agl_core.errors import ConfigError, TransientError
from agl_core.runner.heartbeat import Heartbeat
from agl_core.store import InMemoryLightningStore, LightningStore
from agl_core.types.core import RolloutConfig
from tests.agl_core.runner.conftest import RESOURCES
from tests.agl_core.store.builders import begin


async def run_slow(store, start_runner, agent, **options):
    """Run an agent that takes longer than its lease."""
    await store.add_resources(RESOURCES)
    config = RolloutConfig(unresponsive_seconds=0.8)
    queued = await store.enqueue_rollout("t", config=config)
    runner = start_runner(agent, max_rollouts=1, **options)
    await asyncio.wait_for(runner.iter(), 20)
    return await store.get_rollout_by_id(queued.rollout_id)


@pytest.mark.parametrize("mode", ["asyncio", "thread"])
@pytest.mark.parametrize("interval", [0.1, 0.0, 60.0])
async def test_the_lease_of_a_silent_agent_is_renewed(store, start_runner, mode, interval):
    async def agent(task, llm):
        await asyncio.sleep(2.0)
        return 1.0

    options = {"heartbeat_interval": interval, "heartbeat_launch_mode": mode}
    finished = await run_slow(store, start_runner, agent, **options)
    assert (finished.status, finished.attempt.sequence_id) == ("succeeded", 1)


@pytest.mark.parametrize(("mode", "status"), [("thread", "succeeded"), ("asyncio", "failed")])
async def test_a_thread_renews_while_an_agent_blocks_the_event_loop(
    store, start_runner, mode, status
):
    async def agent(task, llm):
        time.sleep(2.0)  # noqa: ASYNC251 - what such agents do
        return 1.0

    finished = await run_slow(store, start_runner, agent, heartbeat_launch_mode=mode)
    assert finished.status == status
    assert finished.attempt.status == ("succeeded" if mode == "thread" else "unresponsive")


async def test_a_thread_needs_a_store_that_threads_may_use():
    with pytest.raises(ConfigError, match="LightningStoreThreaded"):
        Heartbeat(LightningStore(), "w", launch_mode="thread")


async def test_snapshots_are_sent_at_their_interval_or_not_at_all():
    store = InMemoryLightningStore()
    async with Heartbeat(store, "w", interval_seconds=0.1, jitter_seconds=0.0):
        await asyncio.sleep(0.5)
    worker = await store.get_worker_by_id("w")
    assert worker.heartbeat_stats["pid"]
    async with Heartbeat(store, "silent", interval_seconds=0.0):
        await asyncio.sleep(0.3)
    assert await store.get_worker_by_id("silent") is None


@pytest.mark.parametrize("mode", ["asyncio", "thread"])
async def test_a_slow_snapshot_delays_no_renewal(store, start_runner, monkeypatch, mode):
    snapshots = []

    def slow(include_gpu):
        snapshots.append(include_gpu)
        time.sleep(3.0)
        return {}

    async def agent(task, llm):
        await asyncio.sleep(2.0)
        return 1.0

    monkeypatch.setattr("agl_core.runner.heartbeat.system_snapshot", slow)
    finished = await run_slow(store, start_runner, agent, heartbeat_launch_mode=mode)
    assert finished.status == "succeeded"
    assert len(snapshots) == 1


async def test_a_store_that_does_not_take_a_snapshot_does_not_end_leases(monkeypatch):
    store, entered = InMemoryLightningStore(), asyncio.Event()
    renewals = []

    async def hangs(worker_id, heartbeat_stats):
        entered.set()
        await asyncio.sleep(60)

    async def renew(worker_id, attempts):
        renewals.append(entered.is_set())
        return []

    monkeypatch.setattr(store, "update_worker", hangs)
    monkeypatch.setattr(store, "renew_leases", renew)
    taken = await begin(store)
    started = time.monotonic()
    async with Heartbeat(store, "w", interval_seconds=0.1) as heartbeat:
        with heartbeat.keeping(taken, lambda: None):
            await asyncio.wait_for(entered.wait(), 10)
            await asyncio.sleep(0.8)
    assert sum(renewals) >= 2
    assert time.monotonic() - started < 20.0


async def test_an_attempt_that_the_store_ended_is_stopped_once():
    store, stops = InMemoryLightningStore(), []
    taken = await begin(store)
    async with Heartbeat(store, "w", interval_seconds=0.1) as heartbeat:
        with heartbeat.keeping(taken, lambda: stops.append(1)):
            await store.update_rollout(taken.rollout_id, status="cancelled")
            await asyncio.sleep(0.8)
    assert stops == [1]


async def test_a_store_that_is_away_is_told_again(monkeypatch, caplog):
    store, calls, back = InMemoryLightningStore(), [], threading.Event()
    renew = store.renew_leases

    async def flaky(worker_id, attempts):
        calls.append(attempts)
        if len(calls) < 3:
            raise TransientError("away")
        back.set()
        return await renew(worker_id, attempts)

    monkeypatch.setattr(store, "renew_leases", flaky)
    taken = await begin(store)
    heartbeat = Heartbeat(store, "w", interval_seconds=0.1)
    async with heartbeat:
        with heartbeat.keeping(taken, lambda: None):
            await asyncio.to_thread(back.wait, 10)
    assert "leases not renewed: worker=w: away" in caplog.text
