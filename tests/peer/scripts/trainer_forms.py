"""A trainer takes each component as an instance, class, factory, path, registry's name or dict."""

import asyncio
import importlib
import sys
from typing import Any

from facts import answer

agl: Any = importlib.import_module(sys.argv[1])
HOME = agl.__name__
RESOURCES = {"main_llm": agl.LLM(endpoint="http://127.0.0.1:9/v1", model="none")}


@agl.rollout
def agent(task: Any, llm: Any) -> float:
    agl.emit_annotation({"task": task})
    return task / 10


class QuickRunner(agl.LitAgentRunner):
    """A runner that looks at the queue often."""

    def __init__(self, tracer: Any, max_rollouts: Any = None) -> None:
        super().__init__(tracer, max_rollouts, poll_interval=0.05, interval_jitter=0.0)


class Scores(agl.Algorithm):
    """Enqueues each row and keeps the rewards."""

    found: dict[str, Any]

    def __init__(self, tag: str = "none") -> None:
        self.tag = tag

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        await store.add_resources(self.get_initial_resources())
        ids = []
        for row in train_dataset:
            ids.append((await store.enqueue_rollout(input=row, mode="train")).rollout_id)
        ended: list[Any] = []
        for _ in range(600):  # a minute
            ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
            if len(ended) == len(ids):
                break
            await asyncio.sleep(0.05)
        rewards = [agl.find_final_reward(await store.query_spans(one)) for one in ids]
        self.found = {
            "statuses": [one.status for one in ended],
            "rewards": rewards,
            "tag": self.tag,
            "proxy": self.get_llm_proxy(),
            "adapter": type(self.get_adapter()).__name__,
            "trainer": self.get_trainer().n_runners,
        }


def instances() -> dict[str, Any]:
    tracer = agl.OtelTracer()
    return {
        "tracer": tracer,
        "adapter": agl.TracerTraceToTriplet(),
        "store": agl.InMemoryLightningStore(),
        "runner": QuickRunner(tracer),
        "algorithm": Scores("instance"),
        "strategy": agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm"),
    }


FORMS: dict[str, dict[str, Any]] = {
    "instance": instances(),
    "class": {
        "tracer": agl.OtelTracer,
        "adapter": agl.TracerTraceToTriplet,
        "store": agl.InMemoryLightningStore,
        "runner": QuickRunner,
        "algorithm": Scores,
        "strategy": agl.SharedMemoryExecutionStrategy,
        "max_rollouts": 2,
    },
    "factory": {
        "tracer": lambda: agl.OtelTracer(),
        "adapter": lambda: agl.TracerTraceToTriplet(repair_hierarchy=False),
        "store": lambda: agl.InMemoryLightningStore(),
        "runner": lambda: QuickRunner(agl.OtelTracer()),
        "algorithm": lambda: Scores("factory"),
        "strategy": lambda: agl.SharedMemoryExecutionStrategy(main_thread="algorithm"),
    },
    "path": {
        "tracer": f"{HOME}.tracer.otel.OtelTracer",
        "adapter": f"{HOME}.adapter.triplet.TracerTraceToTriplet",
        "store": f"{HOME}.store.memory.InMemoryLightningStore",
        "runner": f"{__name__}.QuickRunner",
        "algorithm": f"{__name__}.Scores",
        "strategy": f"{HOME}.execution.shared_memory.SharedMemoryExecutionStrategy",
        "max_rollouts": 2,
    },
    "name": {
        "tracer": agl.OtelTracer(),
        "runner": QuickRunner,
        "algorithm": Scores,
        "strategy": "shm",
        "max_rollouts": 2,
    },
    "dict": {
        "tracer": {"type": f"{HOME}.tracer.otel.OtelTracer"},
        "adapter": {"repair_hierarchy": False},
        "store": {"type": f"{HOME}.store.memory.InMemoryLightningStore"},
        "runner": {"type": f"{__name__}.QuickRunner"},
        "algorithm": {"type": f"{__name__}.Scores", "tag": "dict"},
        "strategy": {"type": "shm", "main_thread": "algorithm"},
        "n_runners": 1,
    },
}


def run(form: dict[str, Any]) -> dict[str, Any]:
    trainer = agl.Trainer(initial_resources=RESOURCES, **form)
    parts = ("tracer", "adapter", "store", "runner", "algorithm", "strategy")
    kinds = {part: type(getattr(trainer, part)).__name__ for part in parts}
    trainer.fit(agent, train_dataset=[1, 2])
    return {"kinds": kinds, "runners": trainer.n_runners, **trainer.algorithm.found}


answer({name: run(form) for name, form in FORMS.items()})
