"""Stores and servers that have only what Agent Lightning 0.3 has are used all the same."""

import asyncio
import inspect
import threading

from starlette.responses import JSONResponse

import agl_core as agl
from agl_core.store.base import UNSET
from agl_core.store.older import OlderStore, with_later_methods
from agl_core.store.routes import AppConfig, StoreApp
from agl_core.utils.threaded_server import ThreadedServer

LLM = {"llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")}
LATER_ROUTES = ("/v1/agl/spans/batch", "/v1/agl/leases/renew", "/v1/agl/spans/next/batch")


class StoreOf03(agl.LightningStore):
    """A store with the signatures of 0.3 for what a runner calls."""

    def __init__(self):
        self.inner = agl.InMemoryLightningStore()

    @property
    def capabilities(self):
        return {"async_safe": True, "thread_safe": True}

    async def enqueue_rollout(
        self, input, mode=None, resources_id=None, config=None, metadata=None
    ):
        return await self.inner.enqueue_rollout(input, mode, resources_id, config, metadata)

    async def dequeue_rollout(self, worker_id=None):
        return await self.inner.dequeue_rollout(worker_id)

    async def get_rollout_by_id(self, rollout_id):
        return await self.inner.get_rollout_by_id(rollout_id)

    async def add_resources(self, resources):
        return await self.inner.add_resources(resources)

    async def get_resources_by_id(self, resources_id):
        return await self.inner.get_resources_by_id(resources_id)

    async def get_latest_resources(self):
        return await self.inner.get_latest_resources()

    async def add_span(self, span):
        return await self.inner.add_span(span)

    async def get_many_span_sequence_ids(self, rollout_attempt_ids):
        return await self.inner.get_many_span_sequence_ids(rollout_attempt_ids)

    async def update_attempt(
        self,
        rollout_id,
        attempt_id,
        status=UNSET,
        worker_id=UNSET,
        last_heartbeat_time=UNSET,
        metadata=UNSET,
    ):
        return await self.inner.update_attempt(
            rollout_id, attempt_id, status, worker_id, last_heartbeat_time, metadata
        )

    async def update_worker(self, worker_id, heartbeat_stats=UNSET):
        return await self.inner.update_worker(worker_id, heartbeat_stats)


@agl.rollout
def agent(task, llm):
    if task == "bad":
        raise ValueError("no such task")
    return 0.5


async def run_one(store, task="x"):
    await store.add_resources(LLM)
    rollout = await store.enqueue_rollout(task)
    runner = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=1, poll_interval=0.05)
    with runner.run_context(agent=agent, store=store):
        await asyncio.wait_for(runner.iter(), 30)
    return await store.get_rollout_by_id(rollout.rollout_id)


async def test_a_runner_works_for_a_store_with_the_signatures_of_03():
    store = StoreOf03()
    done = await run_one(store)
    assert done.status == "succeeded"
    spans = await store.inner.query_spans(done.rollout_id)
    assert agl.find_final_reward(spans) == 0.5


async def test_why_an_attempt_failed_is_in_its_metadata():
    done = await run_one(StoreOf03(), "bad")
    assert done.status == "failed"
    assert done.attempt.metadata["failure_kind"] == "agent_error"
    assert "no such task" in done.attempt.metadata["failure_message"]


async def test_an_attempt_that_ended_has_to_stop_and_another_gets_a_sign_of_life():
    store = StoreOf03()
    await store.add_resources(LLM)
    for task in ("one", "two"):
        await store.enqueue_rollout(task)
    later = with_later_methods(store)
    one, two = await later.dequeue_many_rollouts(limit=3, worker_id="w")
    await store.update_attempt(one.rollout_id, one.attempt.attempt_id, "failed")
    pairs = [(r.rollout_id, r.attempt.attempt_id) for r in (one, two)]
    assert await later.renew_leases("w", pairs) == [one.attempt.attempt_id]
    seen = await store.get_rollout_by_id(two.rollout_id)
    assert seen.attempt.last_heartbeat_time is not None


def test_every_store_of_ours_is_used_as_it_is():
    store = agl.InMemoryLightningStore()
    assert with_later_methods(store) is store
    client = agl.LightningStoreClient("http://127.0.0.1:1")
    assert with_later_methods(client) is client
    assert with_later_methods(agl.LightningStoreThreaded(store)) is not None


def test_whoever_wraps_an_older_store_has_every_method():
    own = [n for n, _ in inspect.getmembers(agl.LightningStore, inspect.iscoroutinefunction)]
    assert [n for n in own if getattr(OlderStore, n) is getattr(agl.LightningStore, n)] == []


async def test_a_runner_works_for_a_server_without_our_later_routes(caplog):
    """A real server, but for the routes that 0.3 does not have."""
    caplog.set_level("INFO", "agl_core.store.client")
    store = agl.InMemoryLightningStore()
    asked: list[str] = []
    app = StoreApp(store, AppConfig()).asgi()

    async def of_03(scope, receive, send):
        if scope["type"] == "http" and scope["path"] in LATER_ROUTES:
            asked.append(scope["path"])
            await JSONResponse({"detail": "Not Found"}, 404)(scope, receive, send)
        else:
            await app(scope, receive, send)

    server = ThreadedServer(of_03)
    server.start()
    try:
        client = agl.LightningStoreClient(server.url)
        done = await run_one(client)
        assert done.status == "succeeded"
        spans = await client.query_spans(done.rollout_id)
        assert agl.find_final_reward(spans) == 0.5
        assert await client.renew_leases("w", [(done.rollout_id, done.attempt.attempt_id)]) == [
            done.attempt.attempt_id
        ]
        await client.close()
    finally:
        server.stop()
    assert sorted(set(asked)) == sorted(LATER_ROUTES)
    assert len(asked) == len(set(asked)), "each is asked for once"
    assert "Agent Lightning 0.3 has none" in caplog.text


class Counter(agl.LightningStore):
    """A store that says of itself that it is not async-safe."""

    value = 0

    async def get_latest_resources(self):
        seen = self.value
        await asyncio.sleep(0.001)
        self.value = seen + 1


def test_calls_of_a_store_that_is_not_async_safe_come_one_after_the_other():
    inner = Counter()
    store = agl.LightningStoreThreaded(inner)

    async def work():
        for _ in range(10):
            await store.get_latest_resources()

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inner.value == 20
