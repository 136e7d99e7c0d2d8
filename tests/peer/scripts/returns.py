"""What an agent may return, and what the store has of it then."""

import asyncio
import importlib
import logging
import sys
from typing import Any

from facts import answer, keys, names

agl: Any = importlib.import_module(sys.argv[1])
logging.disable(logging.CRITICAL)
REWARD = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.25}
FIELDS = agl.SpanCoreFields(
    name="agentlightning.annotation",
    status=agl.TraceStatus(status_code="OK"),
    attributes=REWARD,
    start_time=1.0,
    end_time=2.0,
)


class Returns(agl.LitAgent):
    """Returns what it is told to."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        match task:
            case "spans":
                return [
                    agl.Span.from_attributes(attributes={"n": n}, sequence_id=n, name="mine", **ids)
                    for n in (1, 2)
                ]
            case "core fields":
                return [FIELDS]
            case "emitted":
                agl.emit_reward(0.125)
                return None
            case "both":
                agl.emit_reward(0.125)
                return 0.75
            case "raises":
                raise KeyError("mine")
        return {
            "none": None,
            "float": 0.5,
            "bool": True,
            "int": 3,
            "empty": [],
            "text": "text",
            "dict": {"reward": 1.0},
            "mixed": [agl.Span.from_attributes(attributes={}), FIELDS],
            "no spans": [1.0, "x"],
        }[task]


TASKS = ("none", "float", "bool", "int", "spans", "core fields", "empty", "emitted", "both")
FAILING = ("text", "dict", "mixed", "no spans", "raises")


async def main() -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    await store.add_resources({})
    runner = agl.LitAgentRunner(agl.OtelTracer())
    found: dict[str, Any] = {}
    with runner.run_context(agent=Returns(), store=store):
        for task in TASKS:
            ended = await runner.step(task)
            spans = await store.query_spans(ended.rollout_id)
            found[task] = {
                "status": ended.status,
                "attempt": ended.attempt.status,
                "reward": agl.find_final_reward(spans),
                "spans": sorted(names(spans)),
                "keys": keys(spans),
                "has end": ended.end_time is not None,
            }
        found["has a root"] = len(spans) > len(names(spans))
        for task in FAILING:
            try:
                await runner.step(task)
            except Exception as error:  # noqa: BLE001 - compared
                found[task] = {"raised": type(error).__name__}
            else:
                found[task] = {"raised": None}
            rollouts = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=1)
            found[task]["status"] = rollouts[0].status
            found[task]["attempt"] = rollouts[0].attempt.status
    return found


answer(asyncio.run(main()))
