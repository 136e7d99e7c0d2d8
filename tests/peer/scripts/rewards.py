"""Rewards as spans, and which of them is the final one."""

import asyncio
import importlib
import logging
import sys
import warnings
from typing import Any

from facts import answer, fails, names

agl: Any = importlib.import_module(sys.argv[1])
emitter: Any = importlib.import_module(f"{agl.__name__}.emitter")
logging.disable(logging.CRITICAL)


def span(name: str = "agentlightning.annotation", **attributes: Any) -> Any:
    known = {key.replace("__", "."): value for key, value in attributes.items()}
    return agl.Span.from_attributes(attributes=known, name=name)


def emitted(reward: Any, **options: Any) -> Any:
    found = agl.emit_reward(reward, propagate=False, **options)
    return [found.name, dict(found.attributes)]


@agl.rollout
async def agent(task: Any, llm: Any) -> None:
    agl.emit_reward(0.25)
    agl.emit_reward({"style": 0.5, "answer": 1}, primary_key="answer", attributes={"by": "judge"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @emitter.reward
        def judged() -> float:
            return 0.75

        @emitter.reward
        async def judged_async() -> float:
            return 0.875

    judged()
    await judged_async()


async def stored() -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    llm = agl.LLM(endpoint="http://h/v1", model="m")
    with runner.run_context(agent=agent, store=store):
        ended = await runner.step(1, resources={"main_llm": llm})
    spans = await store.query_spans(ended.rollout_id)
    rewards = agl.find_reward_spans(spans)
    return {
        "status": ended.status,
        "names": names(rewards),
        "values": [agl.get_reward_value(one) for one in rewards],
        "dimensions": [
            [[r.name, r.value] for r in agl.get_rewards_from_span(one)] for one in rewards
        ],
        "extra": rewards[1].attributes.get("by"),
        "final": agl.find_final_reward(spans),
    }


old = span("any", agentops__task__output='{"type": "reward", "value": 0.5}')
entity = span("any", agentops__entity__output='{"type": "reward", "value": 2}')
found = {
    "float": emitted(0.5),
    "int": emitted(1),
    "bool": emitted(True),
    "dict": emitted({"b": 0.5, "a": 1.0}, primary_key="a"),
    "attributes": emitted(0.5, attributes={"why": "x"}),
    "text": fails(lambda: emitted("1"), TypeError),
    "none": fails(lambda: emitted(None), TypeError),
    "no key": fails(lambda: emitted({"a": 1.0}), ValueError, "primary_key"),
    "other key": fails(lambda: emitted({"a": 1.0}, primary_key="b"), ValueError, "primary"),
    "text in dict": fails(lambda: emitted({"a": "1"}, primary_key="a"), ValueError),
    "reward at the top": callable(agl.reward),
    "no tracer": fails(lambda: agl.emit_reward(1.0), RuntimeError, "tracer"),
    "stored": asyncio.run(stored()),
    "of 0.2": [agl.get_reward_value(span(reward=0.5)), agl.get_reward_value(span("x", reward=0.5))],
    "of agentops": [agl.get_reward_value(old), agl.get_reward_value(entity)],
    "no reward": [agl.get_reward_value(span(other=1)), agl.is_reward_span(span(other=1))],
    "is reward": [agl.is_reward_span(old), agl.is_reward_span(span(reward=0.0))],
    "last": agl.find_final_reward([old, span(other=1), entity, span(other=2)]),
    "of none": agl.find_final_reward([]),
}
answer(found)
