"""Agents and algorithms for trainers: module level, so that spawned processes find them."""

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from agl_core.algorithm.base import Algorithm
from agl_core.emitter import emit_annotation, find_final_reward
from agl_core.litagent import LitAgent, rollout
from agl_core.types.core import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from agl_core.types.resources import LLM, NamedResources

RESOURCES: NamedResources = {"main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="none")}
RETRIED = RolloutConfig(
    max_attempts=5,
    retry_condition=["unresponsive", "failed"],
    unresponsive_seconds=1.5,
    timeout_seconds=60,
)


@rollout
async def doubles(task: Any, llm: LLM) -> float:
    """Return twice the task; its process is in the trace."""
    emit_annotation({"task": task, "pid": os.getpid()})
    await asyncio.sleep(0.01)
    return 2.0 * task


@rollout
async def dawdles(task: Any, llm: LLM, rollout: AttemptedRollout) -> float:
    """Dawdle with a child process in the first attempt, where the task names a folder to say so."""
    if rollout.attempt.sequence_id == 1 and task["folder"]:
        child = subprocess.Popen(["sleep", "600"])
        (Path(task["folder"]) / f"{os.getpid()}-{child.pid}").touch()
        await asyncio.sleep(600)
    return float(task["number"])


@rollout
async def dies(task: Any, llm: LLM) -> float:
    """End the runner's process, each time."""
    os._exit(7)


@rollout
def holds_on(task: Any, llm: LLM) -> float:
    """Be deaf to all but SIGKILL for a while."""
    import signal

    del signal
    time.sleep(600)
    return 0.0


class Knows(LitAgent[Any]):
    """Says whose it is."""

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> float:
        emit_annotation({"runner": self.runner.worker_id, "n": self.trainer.n_runners})
        await asyncio.sleep(0.05)
        return float(self.runner.get_worker_id() == rollout.attempt.worker_id)


class Enqueues(Algorithm):
    """Enqueue each row, wait for all, and keep the rewards and how many spans there were."""

    def __init__(self, config: RolloutConfig | None = None, timeout: float = 50.0) -> None:
        self.config = config
        self.timeout = timeout
        self.rewards: list[float | None] = []
        self.statuses: list[str] = []
        self.workers: set[str] = set()
        self.notes: list[dict[str, Any]] = []

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        await store.add_resources(self.get_initial_resources() or RESOURCES)
        requests = [
            EnqueueRolloutRequest(input=row, mode="train", config=self.config)
            for row in train_dataset
        ]
        ids = [one.rollout_id for one in await store.enqueue_many_rollouts(requests)]
        ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=self.timeout)
        self.statuses = [one.status for one in ended]
        for one in ids:
            spans = await store.query_spans(one, "latest")
            self.rewards.append(find_final_reward(spans))
            self.notes += [span.attributes for span in spans if span.name.endswith("annotation")]
            attempt = await store.get_latest_attempt(one)
            self.workers.add(str(attempt and attempt.worker_id))


class Synchronous(Enqueues):
    """The same, not async."""

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        asyncio.run(super().run(train_dataset, val_dataset))


class Fails(Algorithm):
    """Raise once a rollout runs."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        await Enqueues().__class__.run(Borrowed(self), train_dataset or [1])
        raise LookupError("the algorithm gave up")


class Borrowed(Enqueues):
    """Enqueues, with another's store."""

    def __init__(self, other: Algorithm) -> None:
        super().__init__()
        self.set_store(other.get_store())
