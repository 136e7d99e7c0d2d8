"""A store's server and client: each method once, over HTTP."""

import asyncio
import importlib
import logging
import socket
import sys
from typing import Any

from facts import answer, fails_async

agl: Any = importlib.import_module(sys.argv[1])
logging.disable(logging.CRITICAL)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def span(rollout: Any, number: int, name: str = "mine") -> Any:
    return agl.Span.from_attributes(
        attributes={"n": number},
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=number,
        name=name,
        trace_id=f"{number:032x}",
        span_id=f"{number:016x}",
    )


async def resources(store: Any) -> dict[str, Any]:
    llm = agl.LLM(endpoint="http://h/v1", model="m", sampling_parameters={"temperature": 0.5})
    proxy = agl.ProxyLLM(endpoint="http://h:1", model="p")
    template = agl.PromptTemplate(template="{x}", engine="f-string")
    nothing = [await store.get_latest_resources(), await store.get_resources_by_id("rs-none")]
    first = await store.add_resources({"llm": llm, "proxy": proxy})
    second = await store.update_resources("mine", {"template": template})
    third = await store.update_resources("mine", {"template": template})
    latest = await store.get_latest_resources()
    again = await store.get_resources_by_id(first.resources_id)
    found = await store.query_resources(resources_id_contains="mi")
    return {
        "nothing": nothing,
        "ids": [first.resources_id[:3], len(first.resources_id), latest.resources_id],
        "versions": [first.version, second.version, third.version, latest.version],
        "kinds": {name: type(one).__name__ for name, one in again.resources.items()},
        "sampling": again.resources["llm"].sampling_parameters,
        "created once": second.create_time == third.create_time,
        "found": [one.resources_id for one in found],
        "total": (await store.query_resources()).total,
    }


async def rollouts(store: Any) -> dict[str, Any]:
    config = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    one = await store.enqueue_rollout(
        input={"q": 1}, mode="train", config=config, metadata={"a": 1}
    )
    request = {"input": 2, "mode": "val", "resources_id": "mine"}
    two, three = await store.enqueue_many_rollouts(
        [agl.EnqueueRolloutRequest(**request), agl.EnqueueRolloutRequest(input=[3])]
    )
    found: dict[str, Any] = {
        "enqueued": [one.status, two.mode, three.input, one.rollout_id[:3], len(one.rollout_id)],
        "latest resources": [one.resources_id == "mine", two.resources_id, three.resources_id],
        "config": [one.config.max_attempts, one.config.retry_condition, two.config.max_attempts],
    }
    taken = await store.dequeue_rollout(worker_id="w1")
    rest = await store.dequeue_many_rollouts(limit=5, worker_id="w2")
    found["taken"] = [
        taken.rollout_id == one.rollout_id,
        taken.status,
        taken.attempt.sequence_id,
        taken.attempt.attempt_id[:3],
        taken.attempt.worker_id,
        [other.input for other in rest],
        await store.dequeue_rollout(worker_id="w1"),
        list(await store.dequeue_many_rollouts(limit=2)),
    ]
    failed = await store.update_attempt(taken.rollout_id, "latest", status="failed")
    requeued = await store.get_rollout_by_id(taken.rollout_id)
    found["failed"] = [failed.status, failed.end_time is not None, requeued.status]
    retried = await store.dequeue_rollout(worker_id="w1")
    found["retried"] = [retried.rollout_id == one.rollout_id, retried.attempt.sequence_id]
    await store.update_attempt(retried.rollout_id, retried.attempt.attempt_id, status="failed")
    attempts = await store.query_attempts(taken.rollout_id)
    latest = await store.get_latest_attempt(taken.rollout_id)
    ended = await store.get_rollout_by_id(taken.rollout_id)
    found["attempts"] = [[a.sequence_id, a.status] for a in attempts]
    found["ended"] = [latest.sequence_id, ended.status, ended.end_time is not None]
    started = await store.start_rollout(input="now", mode="test", worker_id="w3")
    more = await store.start_attempt(started.rollout_id)
    found["started"] = [started.status, started.attempt.sequence_id, more.attempt.sequence_id]
    changed = await store.update_rollout(two.rollout_id, metadata={"b": 2}, status="cancelled")
    found["changed"] = [changed.metadata, changed.status, changed.mode]
    waited = await store.wait_for_rollouts(
        rollout_ids=[three.rollout_id, two.rollout_id, one.rollout_id, "ro-none"], timeout=0
    )
    found["waited"] = [w.rollout_id for w in waited] == [two.rollout_id, one.rollout_id]
    page = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=2, offset=1)
    found["page"] = [len(page), page.limit, page.offset, page.total]
    finished = await store.query_rollouts(status_in=["failed", "cancelled"], sort_by="start_time")
    found["finished"] = [r.status for r in finished]
    found["by id"] = len(await store.query_rollouts(rollout_id_in=[one.rollout_id, "ro-none"]))
    found["nothing"] = [await store.get_rollout_by_id("ro-none")]
    return found


async def spans(store: Any) -> dict[str, Any]:
    rollout = await store.start_rollout(input="spans")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    numbers = [await store.get_next_span_sequence_id(*ids) for _ in range(2)]
    numbers += await store.get_many_span_sequence_ids([ids, ids])
    added = await store.add_span(span(rollout, 5))
    running = await store.get_rollout_by_id(rollout.rollout_id)
    twice = await store.add_span(span(rollout, 5))
    many = await store.add_many_spans([span(rollout, 6, "other"), span(rollout, 5)])
    found = await store.query_spans(rollout.rollout_id)
    named = await store.query_spans(rollout.rollout_id, "latest", name_contains="oth")
    page = await store.query_spans(ids[0], ids[1], limit=1, offset=1, sort_order="desc")
    done = await store.update_attempt(*ids, status="succeeded")
    ended = await store.get_rollout_by_id(rollout.rollout_id)
    return {
        "numbers": numbers,
        "next": await store.get_next_span_sequence_id(*ids),
        "added": [added.sequence_id, added.attributes, twice, [one.name for one in many]],
        "running": [running.status, running.attempt.status],
        "found": [[one.sequence_id, one.name] for one in found],
        "named": [one.name for one in named],
        "page": [[one.name for one in page], page.total],
        "done": [done.status, ended.status, ended.end_time is not None],
    }


async def workers(store: Any) -> dict[str, Any]:
    await store.update_worker("w9", heartbeat_stats={"cpu": 1})
    one = await store.get_worker_by_id("w9")
    taken = await store.get_worker_by_id("w3")
    everyone = await store.query_workers(sort_by="worker_id")
    return {
        "reported": [one.status, one.heartbeat_stats, one.last_heartbeat_time is not None],
        "taken": [taken.status, taken.current_rollout_id is not None],
        "everyone": [worker.worker_id for worker in everyone],
        "nobody": await store.get_worker_by_id("none"),
    }


async def main() -> dict[str, Any]:
    port = free_port()
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", port)
    await server.start()
    client = agl.LightningStoreClient(f"http://127.0.0.1:{port}", retry_delays=())
    try:
        found = {
            "resources": await resources(client),
            "rollouts": await rollouts(client),
            "spans": await spans(client),
            "workers": await workers(client),
        }
        statistics = await client.statistics()
        counted = ("total_rollouts", "total_attempts", "total_spans", "total_workers")
        found["statistics"] = {name: statistics[name] for name in counted}
        found["capabilities"] = dict(client.capabilities)
        found["otlp"] = client.otlp_traces_endpoint().removeprefix(f"http://127.0.0.1:{port}")
        found["server"] = (await server.statistics())["total_rollouts"]
    finally:
        await client.close()
        await server.stop()
    return found


async def refusals() -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    one = await store.start_rollout(input=1)
    return {
        "unknown rollout": await fails_async(
            lambda: store.start_attempt("ro-none"), ValueError, "ro-none", "not found"
        ),
        "unknown attempt": await fails_async(
            lambda: store.update_attempt(one.rollout_id, "at-none", status="failed"),
            ValueError,
            "at-none",
            "not found",
        ),
        "no attempts": await fails_async(
            lambda: store.update_attempt("ro-none", "latest", status="failed"), ValueError
        ),
        "unknown to update": await fails_async(
            lambda: store.update_rollout("ro-none", status="failed"), ValueError, "ro-none"
        ),
        "sorted by nothing": await fails_async(
            lambda: store.query_rollouts(sort_by="nothing"), ValueError, "nothing"
        ),
        "span of nothing": await fails_async(
            lambda: store.add_span(agl.Span.from_attributes(attributes={}, rollout_id="ro-none")),
            ValueError,
            "ro-none",
            "not found",
        ),
        "attempts of nothing": len(await store.query_attempts("ro-none")),
    }


answer({**asyncio.run(main()), "refusals": asyncio.run(refusals())})
