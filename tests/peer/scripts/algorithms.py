"""Algorithms of a user's own, as classes and functions: what they are given and can do."""

import asyncio
import importlib
import logging
import sys
from typing import Any

from facts import answer, fails, names

agl: Any = importlib.import_module(sys.argv[1])
utils: Any = importlib.import_module(f"{agl.__name__}.algorithm.utils")
logging.disable(logging.CRITICAL)
SEEN: dict[str, Any] = {}


def template(text: str) -> dict[str, Any]:
    return {"prompt": agl.PromptTemplate(template=text, engine="f-string")}


@agl.prompt_rollout
async def agent(task: Any, prompt_template: Any) -> float:
    with agl.operation(name="openai.chat.completion", kind="call"):
        agl.emit_annotation({"length": len(prompt_template.format(task=task))})
    return float(len(prompt_template.format(task=task)))


async def score(store: Any, resources_id: str, rows: Any, mode: str) -> list[Any]:
    """Return the rewards of rollouts with one version of the prompt."""
    ids = []
    for row in rows:
        one = await store.enqueue_rollout(
            input=row, mode=mode, resources_id=resources_id, metadata={"by": "script"}
        )
        ids.append(one.rollout_id)
    for _ in range(600):
        ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
        if len(ended) == len(ids):
            break
        await asyncio.sleep(0.05)
    return [agl.find_final_reward(await store.query_spans(one, "latest")) for one in ids]


class Search(agl.Algorithm):
    """Tries two prompts on the train rows and scores the better one on the others."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        scores = {}
        for version, text in enumerate(("a{task}", "abc{task}")):
            await store.update_resources(f"v{version}", template(text))
            scores[f"v{version}"] = await score(store, f"v{version}", train_dataset, "train")
        best = max(scores, key=lambda version: sum(scores[version]))
        validated = await score(store, best, val_dataset, "val")
        latest = await store.get_latest_resources()
        rollouts = await store.query_rollouts(sort_by="start_time")
        spans = await store.query_spans(rollouts[0].rollout_id, "latest")
        reward_spans = await store.query_spans(
            rollouts[0].rollout_id, "latest", name="agentlightning.annotation"
        )
        SEEN["class"] = {
            "scores": scores,
            "best": best,
            "validated": validated,
            "latest": [latest.resources_id, latest.version],
            "resources": sorted(one.resources_id for one in await store.query_resources()),
            "used": [one.resources_id for one in rollouts],
            "metadata": [one.metadata for one in rollouts][:1],
            "modes": [one.mode for one in rollouts],
            "spans": sorted(names(spans)),
            "annotations": len(reward_spans),
            "initial": self.get_initial_resources()["prompt"].template,
            "proxy": self.get_llm_proxy(),
            "adapter": type(self.get_adapter()).__name__,
            "is async": self.is_async(),
        }


@agl.algo
async def functional(
    *, store: Any, adapter: Any, initial_resources: Any, train_dataset: Any, llm_proxy: Any
) -> None:
    resources = await store.add_resources(initial_resources)
    rewards = await score(store, resources.resources_id, train_dataset, "train")
    SEEN["function"] = {
        "rewards": rewards,
        "adapter": type(adapter).__name__,
        "proxy": llm_proxy,
        "version": resources.version,
    }


@agl.algo
def synchronous(store: Any, val_dataset: Any) -> None:
    async def main() -> Any:
        resources = await store.add_resources(template("{task}"))
        return await score(store, resources.resources_id, val_dataset, "val")

    SEEN["sync function"] = asyncio.run(main())


class Synchronous(agl.Algorithm):
    """Not async."""

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        SEEN["sync class"] = [list(train_dataset), val_dataset, self.is_async()]


class Helped(agl.Algorithm):
    """Takes the store and the proxy as arguments."""

    @utils.with_llm_proxy()
    @utils.with_store
    async def run(self, store: Any, llm_proxy: Any, train_dataset: Any, val_dataset: Any) -> None:
        SEEN["helped"] = [hasattr(store, "enqueue_rollout"), llm_proxy, list(train_dataset)]


class Raises(agl.Algorithm):
    """Raises."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        raise LookupError("the algorithm gave up")


def fit(algorithm: Any, **datasets: Any) -> None:
    tracer = agl.OtelTracer()
    agl.Trainer(
        tracer=tracer,
        runner=agl.LitAgentRunner(tracer, poll_interval=0.05, interval_jitter=0.01),
        strategy={"type": "shm", "main_thread": "algorithm"},
        algorithm=algorithm,
        initial_resources=template("initial {task}"),
    ).fit(agent, **datasets)


fit(Search(), train_dataset=["x", "yy"], val_dataset=["zzz"])
fit(functional, train_dataset=["x", "yy"])
fit(Synchronous(), train_dataset=[1, 2])
fit(Helped(), train_dataset=[1])
SEEN["raises"] = fails(lambda: fit(Raises(), train_dataset=[1]), LookupError, "gave up")
synchronous.set_store(agl.InMemoryLightningStore())
bare = agl.Algorithm()
SEEN |= {
    "no store": fails(bare.get_store, ValueError, "store"),
    "no adapter": fails(bare.get_adapter, ValueError, "adapter"),
    "no trainer": fails(bare.get_trainer, ValueError, "trainer"),
    "no proxy": bare.get_llm_proxy(),
    "no resources": bare.get_initial_resources(),
    "no run": fails(lambda: bare.run(), NotImplementedError),
    "dataset not taken": fails(
        lambda: synchronous.run(train_dataset=[1]), TypeError, "train_dataset", "not supported"
    ),
    "function is async": [functional.is_async(), synchronous.is_async()],
    "function is an algorithm": isinstance(functional, agl.Algorithm),
    "function's name": functional.__name__,
}
answer(SEEN)
