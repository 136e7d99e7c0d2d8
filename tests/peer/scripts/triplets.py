"""Recorded spans as triplets: ids, order, agents, rewards."""

import importlib
import logging
import sys
from typing import Any

from facts import answer, fails

agl: Any = importlib.import_module(sys.argv[1])
triplet: Any = importlib.import_module(f"{agl.__name__}.adapter.triplet")
logging.disable(logging.CRITICAL)
LLM = "openai.chat.completion"


class Trace:
    """A trace that is written span by span; each takes one second."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def add(
        self, name: str, attributes: dict[str, Any], parent: str | None = "root", seconds: float = 1
    ) -> str:
        number = len(self.spans) + 1
        span_id = f"{number:016x}" if name != "session" else "root".rjust(16, "0")
        self.spans.append(
            agl.Span.from_attributes(
                attributes=attributes,
                rollout_id="ro-1",
                attempt_id="at-1",
                sequence_id=number,
                trace_id="1" * 32,
                span_id=span_id,
                parent_id=None if parent is None else parent.rjust(16, "0"),
                name=name,
                start_time=float(number),
                end_time=float(number) + seconds,
            )
        )
        return span_id

    def call(self, number: int, parent: str = "root", **more: Any) -> str:
        """Add a model call with prompt ids [n, n] and response ids [n]."""
        attributes = {
            "gen_ai.response.id": f"chat-{number}",
            "gen_ai.request.model": "m",
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": f"question {number}",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": f"answer {number}",
            "prompt_token_ids": [number, number],
            "response_token_ids": [number],
        }
        return self.add(LLM, attributes | more, parent, 0.5)

    def reward(self, value: float) -> None:
        primary = "agentlightning.reward.0"
        attributes = {f"{primary}.name": "primary", f"{primary}.value": value}
        self.add("agentlightning.annotation", attributes, "root", 0.1)


def session() -> Trace:
    trace = Trace()
    trace.add("session", {}, None, 100.0)
    return trace


def adapted(trace: Trace, **options: Any) -> Any:
    found = agl.TracerTraceToTriplet(**options).adapt(trace.spans)
    return [[t.prompt["token_ids"], t.response["token_ids"], t.reward] for t in found]


calls = session()
for number in (1, 2, 3):
    calls.call(number)
calls.reward(0.5)

between = session()
between.call(1)
between.reward(0.25)
between.call(2)
between.reward(0.75)

agents = session()
writer = agents.add("writer", {"agent.name": "writer"}, "root", 3.0)
agents.call(1, writer)
judge = agents.add("judge", {"agent.name": "judge"}, "root", 3.0)
agents.call(2, judge)
agents.reward(1.0)

twice = session()
twice.call(1)
twice.call(1)
twice.call(2)

late = session()
late.call(1)
late.call(2)
late.reward(0.125)
late.reward(1.0)

two = session()
two.call(1)
two.reward(0.25)
two.reward(0.75)

without = session()
without.call(1)
without.add(LLM, {"gen_ai.response.id": "chat-2"}, "root", 0.5)

proxy = session()
for number in (1, 2):
    attributes = {
        "llm.hosted_vllm.id": f"chat-{number}",
        "llm.hosted_vllm.prompt_token_ids": [number, number],
        "llm.hosted_vllm.response_token_ids": f"[[{number}]]",
    }
    proxy.add("raw_gen_ai_request", attributes)
proxy.reward(0.5)

one = agl.TracerTraceToTriplet().adapt(calls.spans)[0]
from_proxy = agl.LlmProxyTraceToTriplet().adapt(proxy.spans)
messages = agl.TraceToMessages().adapt(calls.spans)
policy = triplet.RewardMatchPolicy
answer(
    {
        "calls": adapted(calls),
        "rewards between": adapted(between),
        "one agent": adapted(agents, agent_match="^writer$"),
        "all agents": adapted(agents),
        "other calls": adapted(calls, llm_call_match="nothing"),
        "first sibling": adapted(between, reward_match=policy.FIRST_SIBLING),
        "no repair": adapted(calls, repair_hierarchy=False),
        "called": len(agl.TracerTraceToTriplet()(calls.spans)),
        "the same response twice": adapted(twice),
        "two rewards at the end": adapted(late),
        "two rewards after one call": adapted(two),
        "a call without ids": adapted(without),
        "no spans": fails(lambda: agl.TracerTraceToTriplet().adapt([]), ValueError),
        "keys": [sorted(one.prompt), sorted(one.response), sorted(one.metadata)],
        "contents": [one.prompt["raw_content"], one.response["raw_content"]],
        "response id": one.metadata["response_id"],
        "agent": [t.metadata["agent_name"] for t in agl.TracerTraceToTriplet().adapt(agents.spans)],
        "of the proxy": [
            [t.prompt["token_ids"], t.response["token_ids"], t.reward] for t in from_proxy
        ],
        "messages": [dict(found) for found in messages],
        "policies": sorted(one.name for one in policy),
    }
)
