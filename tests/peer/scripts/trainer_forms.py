"""A trainer takes each component as an instance, class, factory, path, registry's name or dict."""

import asyncio
import importlib
import socket
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def threads(form: str) -> dict[str, Any]:
    """Return a strategy in a form; without a word the runner leads, so that it has to end."""
    strategy = agl.SharedMemoryExecutionStrategy
    led = {"main_thread": "algorithm"}
    return {
        "instance": {"strategy": strategy(**led)},
        "class": {"strategy": strategy, "max_rollouts": 2},
        "factory": {"strategy": lambda: strategy(**led)},
        "path": {
            "strategy": f"{HOME}.execution.shared_memory.{strategy.__name__}",
            "max_rollouts": 2,
        },
        "name": {"strategy": "shm", "max_rollouts": 2},
        "dict": {"strategy": {"type": "shm", **led}, "n_runners": 1},
    }[form]


def processes(form: str) -> dict[str, Any]:
    """Return a strategy in a form."""
    strategy, port = agl.ClientServerExecutionStrategy, free_port()
    return {
        "instance": {"strategy": strategy(n_runners=2, server_port=port)},
        "class": {"strategy": strategy, "port": port},
        "factory": {"strategy": lambda: strategy(server_port=port)},
        "path": {"strategy": f"{HOME}.execution.client_server.{strategy.__name__}", "port": port},
        "name": {"strategy": "cs", "n_runners": 2, "port": port},
        "dict": {"strategy": {"type": "cs", "server_port": port}, "n_runners": 2},
    }[form]


def components(form: str) -> dict[str, Any]:
    """Return the other components in a form; where there is no name for them, in another."""
    tracer = agl.OtelTracer()
    return {
        "instance": {
            "tracer": tracer,
            "adapter": agl.TracerTraceToTriplet(),
            "store": agl.InMemoryLightningStore(),
            "algorithm": Scores("instance"),
        },
        "class": {
            "tracer": agl.OtelTracer,
            "adapter": agl.TracerTraceToTriplet,
            "store": agl.InMemoryLightningStore,
            "runner": QuickRunner,
            "algorithm": Scores,
        },
        "factory": {
            "tracer": lambda: agl.OtelTracer(),
            "adapter": lambda: agl.TracerTraceToTriplet(repair_hierarchy=False),
            "store": lambda: agl.InMemoryLightningStore(),
            "runner": lambda: QuickRunner(agl.OtelTracer()),
            "algorithm": lambda: Scores("factory"),
        },
        "path": {
            "tracer": f"{HOME}.tracer.otel.OtelTracer",
            "adapter": f"{HOME}.adapter.triplet.TracerTraceToTriplet",
            "store": f"{HOME}.store.memory.InMemoryLightningStore",
            "runner": f"{__name__}.QuickRunner",
            "algorithm": f"{__name__}.Scores",
        },
        "name": {"tracer": tracer, "runner": QuickRunner, "algorithm": Scores},
        "dict": {
            "tracer": {"type": f"{HOME}.tracer.otel.OtelTracer"},
            "adapter": {"repair_hierarchy": False},
            "store": {"type": f"{HOME}.store.memory.InMemoryLightningStore"},
            "runner": {"type": f"{__name__}.QuickRunner"},
            "algorithm": {"type": f"{__name__}.Scores", "tag": "dict"},
        },
    }[form]


def run(form: str, strategy: dict[str, Any]) -> dict[str, Any]:
    given = components(form)
    if form == "instance":
        given["runner"] = QuickRunner(given["tracer"])
    trainer = agl.Trainer(initial_resources=RESOURCES, **given, **strategy)
    parts = ("tracer", "adapter", "store", "runner", "algorithm", "strategy")
    kinds = {part: type(getattr(trainer, part)).__name__ for part in parts}
    trainer.fit(agent, train_dataset=[1, 2])
    return {"kinds": kinds, "runners": trainer.n_runners, **trainer.algorithm.found}


FORMS = ("instance", "class", "factory", "path", "name", "dict")
answer(
    {
        "cs": {form: run(form, processes(form)) for form in FORMS},
        "shm": {form: run(form, threads(form)) for form in FORMS},
    }
)
