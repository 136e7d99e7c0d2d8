"""Agents, algorithms and a runner for trainers: module level, so that spawned processes find
them.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

from agl_core.algorithm.base import Algorithm
from agl_core.emitter import emit_annotation, find_final_reward
from agl_core.litagent import LitAgent, rollout
from agl_core.runner import LitAgentRunner
from agl_core.types.core import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from agl_core.types.resources import LLM, NamedResources

RESOURCES: NamedResources = {"main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="none")}
RETRIED = RolloutConfig(
    max_attempts=5, retry_condition=["unresponsive"], unresponsive_seconds=1.5, timeout_seconds=60
)


@rollout
async def doubles(task: Any, llm: LLM) -> float:
    """Return twice the task; its process is in the trace."""
    emit_annotation({"task": task, "pid": os.getpid()})
    return 2.0 * task


@rollout
async def dawdles(task: Any, llm: LLM, rollout: AttemptedRollout) -> float:
    """In the first attempt, where the task names a folder, leave a file there that names this
    process and one that is started, and dawdle.
    """
    if rollout.attempt.sequence_id == 1 and task["folder"]:
        child = await asyncio.create_subprocess_exec("sleep", "600")
        (Path(task["folder"]) / f"{os.getpid()}-{child.pid}").touch()
        await asyncio.sleep(600)
    return float(task["number"])


@rollout
async def dies(task: Any, llm: LLM) -> float:
    """End the runner's process."""
    os._exit(7)


class Doubles(LitAgent[Any]):
    """Doubles where it sees its runner and its trainer."""

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> float:
        emit_annotation({"pid": os.getpid()})
        assert self.runner.get_worker_id() == rollout.attempt.worker_id
        assert self.trainer.n_runners == 2
        return 2.0 * task


class KnowsItsRunner(LitAgent[Any]):
    """Its reward is 1 where the runner that it sees is the one that runs it."""

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> float:
        await asyncio.sleep(0.05)
        return float(self.runner.get_worker_id() == rollout.attempt.worker_id)


class Breaks(LitAgentRunner[Any]):
    """Runs nothing."""

    async def iter(self, *, event: Any = None) -> None:
        raise LookupError("the runner broke")


class Enqueues(Algorithm):
    """Enqueue each row, wait for all, and keep how they ended."""

    def __init__(self, config: RolloutConfig | None = None, timeout: float = 60.0) -> None:
        self.config = config
        self.timeout = timeout
        self.rewards: list[float | None] = []
        self.statuses: list[str] = []
        self.workers: set[str] = set()
        self.pids: set[int] = set()

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        await store.add_resources(self.get_initial_resources() or RESOURCES)
        requests = [
            EnqueueRolloutRequest(input=row, mode="train", config=self.config)
            for row in train_dataset
        ]
        ids = [one.rollout_id for one in await store.enqueue_many_rollouts(requests)]
        ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=self.timeout)
        assert len(ended) == len(ids), f"{len(ended)} of {len(ids)} ended in {self.timeout} s"
        for one in ended:
            spans = await store.query_spans(one.rollout_id, "latest")
            attempt = await store.get_latest_attempt(one.rollout_id)
            assert attempt is not None
            self.statuses.append(one.status)
            self.rewards.append(find_final_reward(spans))
            self.workers.add(str(attempt.worker_id))
            self.pids |= {
                int(str(span.attributes["pid"])) for span in spans if "pid" in span.attributes
            }


class Synchronous(Enqueues):
    """The same, not async."""

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        asyncio.run(super().run(train_dataset, val_dataset))


class GivesUp(Enqueues):
    """Raise once all have ended."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        await super().run(train_dataset, val_dataset)
        raise LookupError("the algorithm gave up")


class WaitsForEver(Algorithm):
    """Enqueue one row and wait."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        await store.add_resources(RESOURCES)
        for row in train_dataset:
            await store.enqueue_rollout(row, config=RETRIED)
        await asyncio.sleep(600)
