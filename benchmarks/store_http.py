"""What the way over HTTP costs, beside the same calls in the store's own process.

The server is a process of its own, on a file. One client asks one request after the other, then 16
at once; two processes with a runner each run 256 rollouts of 5 spans; one rollout gets 10,000
spans.

python -m benchmarks.store_http
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from agl_core.emitter import emit_annotation
from agl_core.litagent import rollout
from agl_core.runner import LitAgentRunner
from agl_core.store import (
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from agl_core.tracer import OtelTracer
from agl_core.types.core import AttemptedRollout, EnqueueRolloutRequest
from agl_core.types.resources import LLM
from agl_core.types.tracer import Span

ROLLOUTS, SPANS_EACH, WORKERS = 256, 5, 2
SPANS = 10_000
REQUESTS = 300
AT_ONCE = 16
RUNNER_CONCURRENCY = 8

Call = Callable[[], Awaitable[object]]


def make_spans(rollout: AttemptedRollout, first: int, count: int) -> list[Span]:
    """Return spans of 200 token ids each."""
    return [
        Span.from_attributes(
            attributes={"token_ids": list(range(200)), "text": "x" * 200},
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=number,
            name="llm",
        )
        for number in range(first, first + count)
    ]


@rollout
async def agent(task: Any, llm: LLM) -> float:
    """Leave five spans: the root, three notes, and the reward."""
    for number in range(SPANS_EACH - 2):
        emit_annotation({"number": number, "token_ids": list(range(200)), "text": "x" * 200})
    return float(task)


def worker(store: LightningStore, number: int, go: Event, is_ready: Event, stop: Event) -> None:
    """Run a runner when told to, until told to stop."""
    runner = LitAgentRunner(
        OtelTracer(), poll_interval=0.05, interval_jitter=0.0, concurrency=RUNNER_CONCURRENCY
    )
    with runner.run_context(agent=agent, store=store, worker_id=number):
        is_ready.set()
        go.wait()
        asyncio.run(runner.iter(event=stop))


async def worked_through(store: LightningStore, client: LightningStore) -> float:
    """Return the seconds that the runners need, from the first dequeue to the last end."""
    context = multiprocessing.get_context("spawn")
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="none")})
    requests = [EnqueueRolloutRequest(input=number) for number in range(ROLLOUTS)]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    go, stop = context.Event(), context.Event()
    ready = [context.Event() for _ in range(WORKERS)]
    processes = [
        context.Process(target=worker, args=(client, number, go, is_ready, stop))
        for number, is_ready in enumerate(ready)
    ]
    for process in processes:
        process.start()
    for is_ready in ready:
        await asyncio.to_thread(is_ready.wait)
    go.set()
    started = time.perf_counter()
    ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=300)
    seconds = time.perf_counter() - started
    stop.set()
    assert [rollout.status for rollout in ended] == ["succeeded"] * ROLLOUTS
    for one in ids:
        assert (await store.query_spans(one, limit=0)).total == SPANS_EACH
    for process in processes:
        await asyncio.to_thread(process.join)
    return seconds


async def median_us(call: Call) -> float:
    """Return the median time of a call in microseconds."""
    times: list[float] = []
    for _ in range(REQUESTS):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


async def per_second(call: Call) -> float:
    """Return the calls per second with `AT_ONCE` in flight."""

    async def caller() -> None:
        for _ in range(REQUESTS // AT_ONCE):
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return REQUESTS // AT_ONCE * AT_ONCE / (time.perf_counter() - started)


async def many_spans(store: LightningStore) -> tuple[float, float]:
    """Return the seconds to add spans to one rollout, in batches of 500, and to read them all."""
    taken = await store.start_rollout("spans")
    batches = [make_spans(taken, first, 500) for first in range(1, SPANS + 1, 500)]
    started = time.perf_counter()
    for batch in batches:
        await store.add_many_spans(batch)
    added = time.perf_counter()
    assert len(await store.query_spans(taken.rollout_id)) == SPANS
    return added - started, time.perf_counter() - added


async def measure(store: LightningStore, elsewhere: LightningStore) -> list[tuple[str, float, str]]:
    """Return each measurement with its unit.

    Args:
        store: Asked here.
        elsewhere: The same for processes of runners.
    """
    rollout = await store.start_rollout("task")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    numbers = iter(range(1, 1_000_000))

    async def add() -> None:
        await store.add_many_spans(make_spans(rollout, next(numbers), 1))

    calls: dict[str, Call] = {
        "get a rollout": lambda: store.get_rollout_by_id(ids[0]),
        "next sequence id": lambda: store.get_next_span_sequence_id(*ids),
        "enqueue": lambda: store.enqueue_rollout("task"),
        "dequeue": lambda: store.dequeue_rollout("w"),
        "add a span": add,
    }
    found = [(name, await median_us(call), "us") for name, call in calls.items()]
    rate = await per_second(calls["get a rollout"])
    found.append((f"get, {AT_ONCE} at once", 1e6 / rate, "us"))
    seconds = await worked_through(store, elsewhere)
    found.append((f"{ROLLOUTS} rollouts x {SPANS_EACH} spans, {WORKERS} runners", seconds, "s"))
    added, read = await many_spans(store)
    found.append((f"add {SPANS} spans to one rollout", added, "s"))
    found.append((f"read {SPANS} spans", read, "s"))
    return found


def serve(path: str, address: "multiprocessing.SimpleQueue[LightningStoreClient]") -> None:
    """Serve a store on a file until killed."""

    async def main() -> None:
        async with LightningStoreServer(SqliteLightningStore(path), port=0) as server:
            address.put(server.client())
            await asyncio.Event().wait()

    asyncio.run(main())


async def main() -> None:
    """Print each measurement over HTTP, in this process, and their ratio."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address = context.SimpleQueue()
        server = context.Process(target=serve, args=(str(Path(folder) / "http.db"), address))
        server.start()
        client = address.get()
        over_http = await measure(client, client)
        await client.close()
        server.kill()
        server.join()
        local = SqliteLightningStore(Path(folder) / "local.db", scan_debounce_seconds=0.05)
        direct = await measure(local, local)
        await local.close()
    for (name, http, unit), (_, here, _) in zip(over_http, direct, strict=True):
        rate = f"{1e6 / http:6.0f}/s" if unit == "us" else ""
        print(
            f"{name:42} {http:8.2f} {unit:2} {rate:8} here {here:8.2f} {unit}: {http / here:.1f}x"
        )


if __name__ == "__main__":
    asyncio.run(main())
