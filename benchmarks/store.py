"""What a store's calls cost, and that it does not grow with the rollouts or spans it holds.

python -m benchmarks.store
"""

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agl_core.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agl_core.store.attempt_table import Deadlines
from agl_core.types.core import AttemptedRollout, EnqueueRolloutRequest
from agl_core.types.tracer import Span

FEW, MANY = 1_000, 50_000
"""Rollouts in the store."""
SPANS = 10_000
"""Spans in one rollout."""
REPEATS = 200
LIVE = 32
"""Rollouts that run while the others have ended."""

Call = Callable[[], Awaitable[object]]


async def median_us(call: Call, repeats: int = REPEATS) -> float:
    """Return the median time of a call in microseconds."""
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


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


async def fill(store: LightningStore, rollouts: int) -> list[AttemptedRollout]:
    """Put rollouts into a store: all have ended but `LIVE` that run and `LIVE` that wait."""
    have = (await store.query_rollouts(limit=0)).total
    while have < rollouts - 2 * LIVE:
        count = min(1000, rollouts - 2 * LIVE - have)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(count)])
        for taken in await store.dequeue_many_rollouts(limit=count, worker_id="w"):
            await store.update_attempt(
                taken.rollout_id, taken.attempt.attempt_id, status="succeeded"
            )
        have += count
    requests = [EnqueueRolloutRequest(input=n) for n in range(2 * LIVE)]
    await store.enqueue_many_rollouts(requests)
    return list(await store.dequeue_many_rollouts(limit=LIVE, worker_id="w"))


async def measure_rollouts(store: LightningStore, rollouts: int) -> dict[str, float]:
    """Return the median of each call in microseconds, with so many rollouts in the store."""
    live = await fill(store, rollouts)
    ids = [rollout.rollout_id for rollout in live]
    numbers = iter(range(10_000))

    async def turn() -> None:
        """One rollout from queue to end, with a span."""
        (taken,) = await store.dequeue_many_rollouts(limit=1, worker_id="w")
        await store.add_many_spans(make_spans(taken, next(numbers), 1))
        await store.update_attempt(taken.rollout_id, "latest", status="succeeded")

    async def wait() -> None:
        """Wait for a rollout that ends at once."""
        (rollout,) = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0)])
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
        await asyncio.sleep(0)
        await store.update_rollout(rollout.rollout_id, status="succeeded")
        await waiting

    async def dequeue() -> None:
        await store.dequeue_rollout("w")

    results = {"enqueue": await median_us(lambda: store.enqueue_rollout("task"))}
    results["dequeue"] = await median_us(dequeue, REPEATS // 2)
    results["dequeue, span, end"] = await median_us(turn, REPEATS // 2)
    results["wait"] = await median_us(wait)
    results["wait, timeout 0"] = await median_us(
        lambda: store.wait_for_rollouts(rollout_ids=ids, timeout=0)
    )
    results["by status, queuing"] = await median_us(
        lambda: store.query_rollouts(status_in=["queuing"], limit=LIVE)
    )
    results["by status, none"] = await median_us(
        lambda: store.query_rollouts(status_in=["cancelled"], limit=LIVE)
    )
    results["get"] = await median_us(lambda: store.get_rollout_by_id(ids[0]))
    pairs = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in live]
    results[f"renew {LIVE} leases"] = await median_us(lambda: store.renew_leases("w", pairs))
    return results


async def measure_spans(store: LightningStore) -> None:
    """Print what spans cost in a rollout with few and with many."""
    rollout = await store.start_rollout("task")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    numbers = iter(range(1, 1_000_000))

    async def add() -> None:
        await store.add_many_spans(make_spans(rollout, next(numbers), 1))

    few = await median_us(add)
    batches = [make_spans(rollout, number, 1000) for number in range(1000, 1000 + SPANS, 1000)]
    started = time.perf_counter()
    for batch in batches:
        await store.add_many_spans(batch)
    bulk = (time.perf_counter() - started) / SPANS
    many = await median_us(add)
    started = time.perf_counter()
    page = await store.query_spans(rollout.rollout_id)
    read = (time.perf_counter() - started) / len(page)
    print(f"  add a span: {few:.0f} us, with {SPANS} in its rollout {many:.0f} us "
          f"({many / few:.2f}x)")  # fmt: skip
    print(f"  add {SPANS} spans: {bulk * 1e6:.0f} us each; read them: {read * 1e6:.0f} us each")
    page_us = await median_us(lambda: store.query_spans(rollout.rollout_id, limit=20, offset=5000))
    block = await median_us(lambda: store.get_many_span_sequence_ids([ids] * 64))
    print(f"  a page of 20 of them: {page_us:.0f} us; a block of 64 sequence ids: {block:.0f} us")


async def measure(name: str, store: LightningStore) -> None:
    """Print the medians of one store."""
    print(name)
    few = await measure_rollouts(store, FEW)
    many = await measure_rollouts(store, MANY)
    for call, time_few in few.items():
        ratio = many[call] / time_few
        print(f"  {call:24} {time_few:7.0f} us at {FEW}, {many[call]:7.0f} us at {MANY}: "
              f"{ratio:.2f}x")  # fmt: skip
    await measure_spans(store)
    await store.close()


def main() -> None:
    """Print medians at 1k and 50k rollouts, and their ratios."""
    deadlines = Deadlines(lease_seconds=math.inf)  # nobody sends heartbeats here
    asyncio.run(measure("in memory", InMemoryLightningStore(deadlines=deadlines)))
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteLightningStore(Path(folder) / "store.db", deadlines=deadlines)
        asyncio.run(measure("on disk", store))


if __name__ == "__main__":
    main()
