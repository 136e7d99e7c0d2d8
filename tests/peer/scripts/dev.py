"""`Trainer.dev` with Baseline, in threads and processes; what it refuses; deprecated names."""

import asyncio
import importlib
import logging
import socket
import sys
import warnings
from typing import Any

from facts import answer, fails

agl: Any = importlib.import_module(sys.argv[1])
RESOURCES = {"main_llm": agl.LLM(endpoint="http://h/v1", model="m")}
logging.disable(logging.CRITICAL)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@agl.rollout
def agent(task: Any, llm: Any) -> float:
    agl.emit_annotation({"task": task})
    if task == 13:
        raise LookupError("unlucky")
    return task / 2


def runner(tracer: Any) -> Any:
    return agl.LitAgentRunner(tracer, poll_interval=0.05, interval_jitter=0.01)


class Ended(agl.Hook):
    """Notes what ends."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def on_rollout_end(self, *, rollout: Any, **_: Any) -> None:
        self.seen.append([rollout.input, rollout.mode, rollout.resources_id])


def dev(algorithm: Any) -> dict[str, Any]:
    tracer, hook = agl.OtelTracer(), Ended()
    trainer = agl.Trainer(
        tracer=tracer,
        runner=runner(tracer),
        strategy={"type": "shm", "main_thread": "algorithm"},
        initial_resources=RESOURCES,
        algorithm=algorithm,
        hooks=hook,
    )
    trainer.dev(agent, [1, 13, 2], val_dataset=[3])
    return {"seen": sorted(hook.seen), "kind": type(trainer.algorithm).__name__}


async def kept(store: Any) -> list[Any]:
    """Return what a store has of each rollout."""
    rollouts = await store.query_rollouts(sort_by="start_time")
    return [
        [
            one.input,
            one.mode,
            one.status,
            one.resources_id,
            agl.find_final_reward(await store.query_spans(one.rollout_id, "latest")),
        ]
        for one in rollouts
    ]


def dev_elsewhere() -> list[Any]:
    """Return what is in the trainer's store after two runner processes."""
    tracer = agl.OtelTracer()
    trainer = agl.Trainer(
        tracer=tracer,
        runner=runner(tracer),
        n_runners=2,
        port=free_port(),
        initial_resources=RESOURCES,
        algorithm=agl.Baseline(polling_interval=0.05),
    )
    trainer.dev(agent, [1, 13, 2], val_dataset=[3])
    return asyncio.run(kept(trainer.store))


class Slow(agl.Algorithm):
    """Not a FastAlgorithm."""


def fits(**parts: Any) -> Any:
    return agl.Trainer(tracer=agl.OtelTracer(), initial_resources=RESOURCES, **parts)


def deprecated(**parts: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = agl.Trainer(tracer=agl.OtelTracer(), **parts)
    told = [str(one.message) for one in caught if one.category is DeprecationWarning]
    return [
        trainer.n_runners,
        trainer.max_rollouts,
        [any(name in text for text in told) for name in parts],
    ]


baseline = agl.Baseline(polling_interval=0.05, max_queue_length=2, span_verbosity="none")
found = {
    "processes": dev_elsewhere(),
    "given": dev(baseline),
    "epochs": dev(agl.Baseline(polling_interval=0.05, n_epochs=2)),
    "defaults": [
        type(getattr(fits(), name)).__name__ for name in ("store", "adapter", "strategy", "runner")
    ],
    "no fast algorithm": fails(
        lambda: fits(algorithm=Slow(), strategy="shm").dev(agent, [1]), TypeError, "FastAlgorithm"
    ),
    "split": fails(lambda: agl.Baseline(train_split=1.5), ValueError, "train_split"),
    "n_workers": deprecated(n_workers=3),
    "max_tasks": deprecated(max_tasks=5),
    "triplet_exporter": deprecated(triplet_exporter=agl.TracerTraceToTriplet()),
    "fast": [isinstance(agl.Baseline(), agl.FastAlgorithm), agl.Baseline().is_async()],
}
answer(found)
