"""A runner without a trainer: one rollout at a time, or those of a queue."""

import asyncio
import importlib
import logging
import sys
from typing import Any

from facts import answer, fails, fails_async

agl: Any = importlib.import_module(sys.argv[1])
logging.disable(logging.CRITICAL)


@agl.rollout
async def agent(task: Any, llm: Any) -> float:
    agl.emit_annotation({"model": llm.model})
    if task == "fails":
        raise LookupError("no such thing")
    return float(len(task))


def llm(model: str) -> dict[str, Any]:
    return {"main_llm": agl.LLM(endpoint="http://h/v1", model=model)}


async def steps() -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    found: dict[str, Any] = {}
    with runner.run_context(agent=agent, store=store, worker_id=3) as same:
        found["same runner"] = same is runner
        first = await runner.step("abc", resources=llm("one"), mode="train")
        again = await runner.step("ab")
        found["first"] = [first.status, first.mode, first.input, first.resources_id is not None]
        found["type"] = type(first).__name__
        found["attempt"] = [first.attempt.status, first.attempt.sequence_id]
        found["same resources"] = again.resources_id == first.resources_id
        found["failure"] = await fails_async(
            lambda: runner.step("fails", resources=llm("two")), LookupError, "no such thing"
        )
    rollouts = await store.query_rollouts(sort_by="start_time")
    found["statuses"] = [one.status for one in rollouts]
    found["models"] = [
        [
            s.attributes["model"]
            for s in await store.query_spans(r.rollout_id)
            if "model" in s.attributes
        ]
        for r in rollouts
    ]
    found["after"] = await fails_async(lambda: runner.step("abc"), ValueError)
    return found


async def queued() -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    await store.add_resources(llm("one"))
    for task in ("a", "fails", "bbb", "late"):
        await store.enqueue_rollout(input=task, mode="train")
    runner = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=3, poll_interval=0.05)
    with runner.run_context(agent=agent, store=store, worker_id=0):
        await runner.iter()
    rollouts = await store.query_rollouts(sort_by="start_time")
    statistics = await store.statistics()
    return {
        "statuses": [one.status for one in rollouts],
        "worker": rollouts[0].attempt.worker_id,
        "counts": [statistics["total_rollouts"], statistics["total_attempts"]],
    }


runner = agl.LitAgentRunner(agl.OtelTracer())
found = {"step": asyncio.run(steps()), "iter": asyncio.run(queued())}
found |= {
    "no agent": fails(lambda: runner.get_agent(), ValueError),
    "no store": fails(lambda: runner.get_store(), ValueError),
    "no run": fails(lambda: runner.run(), RuntimeError),
    "worker before": fails(lambda: runner.get_worker_id(), ValueError),
}
answer(found)
