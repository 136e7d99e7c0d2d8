"""Several processes work through a server, which may be killed and started again on its file."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from agl_core.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agl_core.types.core import EnqueueRolloutRequest
from tests.agl_core.store.builders import make_span, take
from tests.deployments.store_process import StoreProcess

WORKER = """
import asyncio, json, sys
from agl_core.store import LightningStoreClient
from tests.agl_core.store.builders import make_span

async def main():
    done = []
    async with LightningStoreClient(sys.argv[1]) as store:
        while (taken := await store.dequeue_rollout(sys.argv[2])) is not None:
            ids = (taken.rollout_id, taken.attempt.attempt_id)
            numbers = await store.get_many_span_sequence_ids([ids] * 5)
            await store.add_many_spans([make_span(taken, number) for number in numbers])
            await store.update_attempt(*ids, status="succeeded")
            done.append(taken.rollout_id)
    print(json.dumps(done))

asyncio.run(main())
"""


def start_worker(url: str, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, url, name],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )


async def test_two_processes_work_through_256_rollouts_with_5_spans_each():
    store = InMemoryLightningStore()
    async with LightningStoreServer(store, port=0) as server:
        requests = [EnqueueRolloutRequest(input=number) for number in range(256)]
        queued = await server.enqueue_many_rollouts(requests)
        workers = [start_worker(server.endpoint, f"w{number}") for number in range(2)]
        ids = [rollout.rollout_id for rollout in queued]
        ended = await server.wait_for_rollouts(rollout_ids=ids, timeout=120)
        outputs = [
            (await asyncio.to_thread(worker.communicate, timeout=60))[0] for worker in workers
        ]
        done = [rollout_id for output in outputs for rollout_id in json.loads(output)]
        assert sorted(done) == sorted(ids)
        assert {rollout.status for rollout in ended} == {"succeeded"}
        for rollout_id in ids[::51]:
            spans = await server.query_spans(rollout_id)
            assert [span.sequence_id for span in spans] == [1, 2, 3, 4, 5]
        found = await server.statistics()
        assert (found.get("total_attempts"), found.get("total_spans")) == (256, 1280)
    await store.close()


async def work(
    client: LightningStoreClient, acknowledged: dict[str, list[str]], begun: asyncio.Event
) -> None:
    """Note what is acknowledged, span ids by the rollout that succeeded, and say when it is
    some.
    """
    while len(acknowledged) < 40:
        queued = await client.enqueue_rollout("task")
        taken = await take(client, "w")
        assert taken.rollout_id == queued.rollout_id
        spans = [make_span(taken, number) for number in (1, 2)]
        await client.add_many_spans(spans)
        await client.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="succeeded")
        acknowledged[taken.rollout_id] = [span.span_id for span in spans]
        if len(acknowledged) == 10:
            begun.set()


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(tmp_path: Path):
    path = str(tmp_path / "store.db")
    acknowledged: dict[str, list[str]] = {}
    begun = asyncio.Event()
    with StoreProcess("--port", "0", "--path", path) as first:
        port = first.url.rpartition(":")[2]
        client = LightningStoreClient(
            first.url, run_id=first.run_id, retry_delays=(0.5,) * 100, health_retry_delays=(0.1,)
        )
        working = asyncio.create_task(work(client, acknowledged, begun))
        await begun.wait()
        first.kill()
    again = await asyncio.to_thread(StoreProcess, "--port", port, "--path", path)
    with again:
        assert again.run_id == first.run_id
        await working
        succeeded = await client.query_rollouts(status_in=["succeeded"])
        assert {rollout.rollout_id for rollout in succeeded} == set(acknowledged)
        for rollout_id, span_ids in acknowledged.items():
            spans = await client.query_spans(rollout_id)
            assert [span.span_id for span in spans] == span_ids
        assert (await client.statistics()).get("total_attempts") == len(acknowledged)
        await client.close()


async def test_a_wait_goes_on_when_the_server_comes_back(tmp_path: Path):
    path = str(tmp_path / "store.db")
    with StoreProcess("--port", "0", "--path", path) as first:
        client = LightningStoreClient(first.url, retry_delays=(0.5,) * 100)
        queued = await client.enqueue_rollout("task")
        waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=[queued.rollout_id]))
        await asyncio.sleep(0.5)
        first.kill()
    port = first.url.rpartition(":")[2]
    again = await asyncio.to_thread(StoreProcess, "--port", port, "--path", path)
    with again:
        await client.update_rollout(queued.rollout_id, status="cancelled")
        (ended,) = await asyncio.wait_for(waiting, 60)
        assert ended.status == "cancelled"
        await client.close()
