"""Functions and classes as agents: what they are given, and what is refused."""

import asyncio
import importlib
import logging
import sys
from typing import Any

from facts import answer, fails

agl: Any = importlib.import_module(sys.argv[1])
logging.disable(logging.CRITICAL)
PROXY = agl.ProxyLLM(endpoint="http://127.0.0.1:9/v1", model="m", sampling_parameters={"top_p": 1})
TEMPLATE = agl.PromptTemplate(template="say {word}", engine="f-string")
RESOURCES = {"template": TEMPLATE, "main_llm": PROXY}
GIVEN: list[Any] = []


@agl.rollout
def plain(task: Any, llm: Any) -> float:
    """An agent's text."""
    GIVEN.append([task, type(llm).__name__, llm.model, "/rollout/ro-" in llm.endpoint])
    return 0.5


@agl.rollout
async def plain_async(task: Any, llm: Any, rollout: Any) -> None:
    GIVEN.append([task, type(llm).__name__, type(rollout).__name__, rollout.mode])


@agl.llm_rollout(strip_proxy=False)
def unstripped(task: Any, llm: Any, rollout: Any) -> float:
    url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
    tail = url.removeprefix("http://127.0.0.1:9/rollout/" + rollout.rollout_id)
    GIVEN.append([task, type(llm).__name__, tail.startswith("/attempt/at-"), url[-3:]])
    return 1.0


@agl.llm_rollout
async def stripped_async(task: Any, llm: Any) -> float:
    GIVEN.append([task, type(llm).__name__, llm.sampling_parameters])
    return 2.0


@agl.prompt_rollout
def prompted(task: Any, prompt_template: Any) -> float:
    GIVEN.append([task, prompt_template.format(word="hello")])
    return 3.0


@agl.prompt_rollout
async def prompted_async(task: Any, prompt_template: Any, rollout: Any) -> float:
    GIVEN.append([task, prompt_template.engine, rollout.input])
    return 4.0


class Modes(agl.LitAgent):
    """Says which of its methods was called."""

    def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        GIVEN.append(["training", sorted(resources), rollout.mode])
        return 5.0

    def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        GIVEN.append(["validation", type(self.runner).__name__, type(self.tracer).__name__])
        return 6.0


class Async(agl.LitAgent):
    """Async, one method for all modes."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        GIVEN.append(["async", rollout.mode])
        return 7.0


def no_resource(task: Any) -> float:
    return 0.0


def no_known_resource(task: Any, model: Any) -> float:
    return 0.0


async def main() -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    ends: list[Any] = []
    agents = (plain, plain_async, unstripped, stripped_async, prompted, prompted_async, Async())
    runs = [(agent, "train") for agent in agents]
    runs += [(Modes(), mode) for mode in ("train", "val", "test", None)]
    for number, (agent, mode) in enumerate(runs):
        runner = agl.LitAgentRunner(agl.OtelTracer())
        with runner.run_context(agent=agent, store=store):
            ended = await runner.step(number, resources=RESOURCES, mode=mode)
        spans = await store.query_spans(ended.rollout_id)
        ends.append([ended.status, ended.mode, agl.find_final_reward(spans)])
    return {"ends": ends, "given": list(GIVEN)}


found = asyncio.run(main())
llm = agl.LLM(endpoint="http://h/v1", model="m")
found |= {
    "name": plain.__name__,
    "text": plain.__doc__,
    "is an agent": isinstance(plain, agl.LitAgent),
    "is async": [agent.is_async() for agent in (plain, plain_async, Modes(), Async())],
    "called": plain("called", llm),
    "no resource": fails(lambda: agl.rollout(no_resource), NotImplementedError),
    "no known resource": fails(lambda: agl.rollout(no_known_resource), NotImplementedError),
    "llm wanted": fails(lambda: agl.llm_rollout(no_known_resource), ValueError, "llm"),
    "prompt wanted": fails(
        lambda: agl.prompt_rollout(no_known_resource), ValueError, "prompt_template"
    ),
    "one parameter": fails(lambda: agl.llm_rollout(no_resource), ValueError, "at least 2"),
    "sync called async": fails(
        lambda: asyncio.run(plain.rollout_async(1, {"main_llm": llm}, None)), RuntimeError
    ),
    "async called sync": fails(
        lambda: plain_async.rollout(1, {"main_llm": llm}, None), RuntimeError, "async"
    ),
    "no runner": fails(lambda: Async().runner, ValueError),
    "no trainer": fails(lambda: Async().trainer, ValueError),
    "half an address": fails(lambda: PROXY.get_base_url("r", None), ValueError),
    "raw address": PROXY.get_base_url(None, None),
}
answer(found)
