"""A runner in a process of its own: module level, so that `spawn` finds it."""

import asyncio
from pathlib import Path

from agl_core.emitter import emit_annotation
from agl_core.litagent import rollout
from agl_core.runner import LitAgentRunner
from agl_core.store import SqliteLightningStore
from agl_core.tracer import OtelTracer


@rollout
async def agent(task, llm, rollout):
    """Dawdle in the first attempt where it is told to."""
    emit_annotation({"attempt": rollout.attempt.sequence_id, "task": task["number"]})
    if rollout.attempt.sequence_id == 1 and task["dawdles"]:
        await asyncio.sleep(task["seconds"])
    return float(task["number"])


def make_runner(**options) -> LitAgentRunner:
    settings = {"poll_interval": 0.05, "interval_jitter": 0.0, "heartbeat_interval": 0.2}
    return LitAgentRunner(OtelTracer(), **settings | options)


def work(runner: LitAgentRunner, store: SqliteLightningStore, worker_id: int) -> None:
    """Run rollouts until killed, or `max_rollouts`."""
    with runner.run_context(agent=agent, store=store, worker_id=worker_id):
        asyncio.run(runner.iter())


def work_and_say(path: Path, worker_id: int) -> None:
    work(make_runner(concurrency=2), SqliteLightningStore(path), worker_id)
