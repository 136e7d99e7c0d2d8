"""The order in which hooks are called around an attempt, with what, and what their errors do."""

import asyncio
import importlib
import logging
import sys
from typing import Any

from facts import answer, names

agl: Any = importlib.import_module(sys.argv[1])
logging.disable(logging.CRITICAL)
CALLS: list[str] = []
AT_END: list[int] = []
GIVEN: dict[str, Any] = {}


class Notes(agl.Hook):
    """Notes each call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def note(self, point: str, given: dict[str, Any]) -> None:
        shown = {key: type(value).__name__ for key, value in given.items() if key != "spans"}
        if "spans" in given:
            AT_END.append(len(names(given["spans"])))
        CALLS.append(f"{self.name}: {point}")
        GIVEN[point] = shown | {"status": given["rollout"].status}

    async def on_rollout_start(self, **given: Any) -> None:
        self.note("rollout start", given)

    async def on_trace_start(self, **given: Any) -> None:
        self.note("trace start", given)
        agl.emit_annotation({"by": self.name})

    async def on_trace_end(self, **given: Any) -> None:
        self.note("trace end", given)
        agl.emit_annotation({"after": self.name})

    async def on_rollout_end(self, **given: Any) -> None:
        self.note("rollout end", given)


class Raises(agl.Hook):
    """Raises at each point."""

    async def on_rollout_start(self, **given: Any) -> None:
        raise LookupError("start")

    async def on_trace_end(self, **given: Any) -> None:
        raise LookupError("trace end")

    async def on_rollout_end(self, **given: Any) -> None:
        raise LookupError("end")


@agl.rollout
def agent(task: Any, llm: Any) -> float:
    CALLS.append("agent")
    if task == "fails":
        raise KeyError("mine")
    return 0.5


async def run(task: Any, hooks: list[Any]) -> dict[str, Any]:
    CALLS.clear()
    AT_END.clear()
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    raised = None
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        try:
            llm = agl.LLM(endpoint="http://h/v1", model="m")
            await runner.step(task, resources={"main_llm": llm})
        except KeyError as error:
            raised = str(error)
    rollout = (await store.query_rollouts())[0]
    spans = await store.query_spans(rollout.rollout_id)
    return {
        "calls": list(CALLS),
        "spans at its end": list(AT_END),
        "status": rollout.status,
        "raised": raised,
        "spans": sorted(names(spans)),
    }


found = {
    "one": asyncio.run(run("works", [Notes("a")])),
    "two": asyncio.run(run("works", [Notes("a"), Notes("b")])),
    "failed": asyncio.run(run("fails", [Notes("a")])),
    "raising": asyncio.run(run("works", [Raises(), Notes("b")])),
}
CALLS.clear()
trainer = agl.Trainer(
    tracer=(tracer := agl.OtelTracer()),
    runner=agl.LitAgentRunner(tracer, max_rollouts=1, poll_interval=0.05),
    strategy="shm",
    algorithm=agl.Baseline(polling_interval=0.05),
    initial_resources={"main_llm": agl.LLM(endpoint="http://h/v1", model="m")},
    hooks=Notes("single"),
)
trainer.fit(agent, train_dataset=["works"])
found["trainer"] = {
    "hooks": [type(hook).__name__ for hook in trainer.hooks],
    "calls": list(CALLS),
    "given": GIVEN,
}
answer(found)
