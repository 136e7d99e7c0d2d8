"""What the fan-out of rollouts costs beside what Prefect itself costs.

N rollouts whose agent does nothing go through the iteration flow, in this process and on a process
pool in 4 shards. Beside them, in the same run: a bare flow with N tasks that do nothing, and 4
empty flow runs on the pool. Everything on a Prefect server of its own (SQLite, tuned).

    python -m benchmarks.fan_out [512 2048]

Our own CPU is the CPU of the rollout stage less that of the bare flow (and, on the pool, less that
of the empty flow runs).
"""

import argparse
import asyncio
import importlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from agl_core import progress, semconv
from agl_core.config import RolloutSettings, RunConfig
from agl_core.ledger.run import open_run
from agl_core.lifeline import spawn
from agl_core.serving.weights import weights_digest
from agl_core.tracer.current import get_current_attempt
from agl_core.types.core import AttemptedRollout
from agl_core.types.resources import LLM
from deployments.server import CLIENT_SETTINGS, drain, free_port, prefect_server

SHARDS = 4
CONCURRENCY = 32
SAMPLES = 8
POLICY = Path("examples/calculator/policy")
PREFECT = str(Path(sys.executable).with_name("prefect"))


@cache
def _digest() -> str:
    return weights_digest(POLICY)


async def does_nothing(task: Any, llm: LLM, rollout: AttemptedRollout) -> float:
    """Leave the span that a model call would, without one."""
    attempt = get_current_attempt()
    assert attempt is not None
    call = attempt.tracer.start_call(attempt.rollout_id, attempt.attempt_id)
    call.span.set_attributes(
        {
            semconv.REQUEST_TEMPERATURE: 1.0,
            semconv.PROMPT_TOKEN_IDS: [5, 6, 7],
            semconv.RESPONSE_TOKEN_IDS: [8, 9],
            semconv.LOGPROBS: [-0.5, -0.25],
            semconv.POLICY_VERSION: llm.model,
            semconv.WEIGHTS_DIGEST: _digest(),
        }
    )
    call.span.end()
    return float((rollout.metadata or {})["sample"] % 2)


def make_config(ledger: str, run_id: str, rollouts: int, deployment: str | None) -> RunConfig:
    """Return a run of one iteration of that many rollouts."""
    return RunConfig.model_validate(
        {
            "run_id": run_id,
            "ledger": ledger,
            "agent": "benchmarks.fan_out:does_nothing",
            "preflight": {"canary": False},  # a flow run of its own on the pool
            "train_data": "examples/calculator/data/train.jsonl",
            "algorithm": {
                "type": "verl",
                "config": {
                    "actor_rollout_ref.model.path": str(POLICY),
                    "data.train_batch_size": rollouts // SAMPLES,
                    "data.max_prompt_length": 128,
                    "data.max_response_length": 16,
                    "actor_rollout_ref.rollout.n": SAMPLES,
                    "actor_rollout_ref.rollout.temperature": 1.0,
                    "actor_rollout_ref.actor.ppo_mini_batch_size": rollouts // SAMPLES,
                    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
                    "algorithm.adv_estimator": "grpo",
                    "trainer.total_training_steps": 1,
                },
            },
            "rollout": RolloutSettings(
                concurrency=CONCURRENCY,
                shard_size=rollouts // SHARDS if deployment else rollouts,
                deployment=deployment,
            ).model_dump(),
        }
    )


@dataclass
class Cost:
    """What something took."""

    wall: float = 0.0
    """Seconds."""
    cpu: float = 0.0
    """Seconds, of this process."""
    processes: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    """CPU seconds and peak memory in bytes of each process on the pool."""
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """New rows of the server's database, by table."""

    @property
    def pool_cpu(self) -> float:
        """CPU seconds of the processes on the pool."""
        return sum(cpu for cpu, _ in self.processes.values())


class Meter:
    """Measures flows against one server."""

    def __init__(self, database: Path) -> None:
        self._database = database

    @contextmanager
    def measure(self) -> Generator[Cost]:
        """Measure the enclosed flows, until the server has recorded them."""
        before, since, cost = self._rows(), datetime.now(UTC), Cost()
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(cost.processes, stop))
        watcher.start()
        try:
            yield cost
        finally:
            stop.set()
            watcher.join()
        asyncio.run(drain(since))
        time.sleep(3.0)
        after = self._rows()
        cost.rows = {
            table: count - before.get(table, 0)
            for table, count in after.items()
            if count > before.get(table, 0)
        }

    def _rows(self) -> dict[str, int]:
        with closing(sqlite3.connect(self._database)) as database:
            names = database.execute("select name from sqlite_master where type = 'table'")
            tables = [name for (name,) in names if not name.startswith("sqlite")]
            count = "select count(*) from "
            return {name: database.execute(f'{count}"{name}"').fetchone()[0] for name in tables}


def _watch(found: dict[int, tuple[float, int]], stop: threading.Event) -> None:
    """Look at the processes of flow runs on the pool until told to stop."""
    known: dict[int, psutil.Process] = {}
    me, next_search = psutil.Process(), 0.0
    while not stop.wait(0.1):
        if time.monotonic() > next_search:
            next_search = time.monotonic() + 0.5
            known |= {p.pid: p for p in me.children(recursive=True) if _runs_a_flow(p)}
        for pid, process in list(known.items()):
            try:
                times, memory = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                del known[pid]
                continue
            peak = max(memory, found.get(pid, (0.0, 0))[1])
            found[pid] = (times.user + times.system, peak)


def _runs_a_flow(process: psutil.Process) -> bool:
    try:
        return "prefect.engine" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def measure_bare_flow(rollouts: int) -> Cost:
    """Run a flow of that many tasks that do nothing, scheduled as a shard schedules its own."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    @task(task_run_name="rollout-{index}", cache_policy=NO_CACHE, persist_result=False, retries=1)
    async def nothing(index: int, rollout_id: str) -> float:
        del index, rollout_id
        return 0.0

    @flow(name="bare", persist_result=False)
    async def bare() -> None:
        slots = asyncio.Semaphore(CONCURRENCY)
        # Prefect's overloads know nothing of return_state for async tasks.
        run_task: Any = nothing

        async def run(index: int) -> None:
            async with slots:
                await run_task(index, f"ro-{index}", return_state=True)

        async with asyncio.TaskGroup() as group:
            for index in range(rollouts):
                group.create_task(run(index))

    cost = Cost()
    started, cpu = time.perf_counter(), time.process_time()
    asyncio.run(bare())
    cost.wall, cost.cpu = time.perf_counter() - started, time.process_time() - cpu
    return cost


def measure_empty_runs() -> float:
    """Run empty flow runs on the pool at once; return the seconds that they take."""
    from prefect.deployments import arun_deployment
    from prefect.flow_runs import wait_for_flow_run

    async def run() -> None:
        runs = await asyncio.gather(
            *(arun_deployment("empty/empty", timeout=0) for _ in range(SHARDS))
        )
        ended = await asyncio.gather(*(wait_for_flow_run(run.id, timeout=300) for run in runs))
        assert all(run.state and run.state.is_completed() for run in ended)

    started = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - started


def measure_iteration(config: RunConfig) -> tuple[Cost, dict[str, float]]:
    """Run one iteration; return what its rollout stage took, and the seconds of each stage."""
    from flows.training_run import training_run

    cost, marks = Cost(), dict[str, tuple[float, float]]()

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.StageStarted):
            marks[event.stage] = (time.perf_counter(), time.process_time())

    async def main() -> None:
        with progress.listen(listen):
            await training_run(config)

    asyncio.run(main())
    started, ended = marks["rollout"], marks["collect"]
    cost.wall, cost.cpu = ended[0] - started[0], ended[1] - started[1]
    (manifest,) = open_run(config.ledger, config.run_id).manifests()
    assert manifest.coverage.trained == manifest.coverage.expected
    return cost, manifest.cost.stage_seconds


def compare(meter: Meter, folder: str, rollouts: int) -> None:
    """Print everything for one number of rollouts."""
    print(f"{rollouts} rollouts")
    with meter.measure() as measured:
        bare = measure_bare_flow(rollouts)
    _print("bare flow of tasks", bare, measured)
    with meter.measure() as measured:
        config = make_config(folder, f"in-process-{rollouts}", rollouts, None)
        cost, stages = measure_iteration(config)
    _print("in process", cost, measured)
    print(f"    our own CPU: {cost.cpu - bare.cpu:.1f} s")
    _print_stages(stages)
    with meter.measure() as empty:
        empty.wall = measure_empty_runs()
    _print(f"{SHARDS} empty flow runs", empty, empty)
    with meter.measure() as measured:
        config = make_config(folder, f"pool-{rollouts}", rollouts, "rollout-shard/rollout-shard")
        cost, stages = measure_iteration(config)
    _print(f"pool, {SHARDS} shards", cost, measured)
    own = cost.cpu + measured.pool_cpu - empty.pool_cpu - bare.cpu
    print(f"    our own CPU, training process and shards: {own:.1f} s")
    _print_stages(stages)


def _print(name: str, cost: Cost, measured: Cost) -> None:
    print(f"  {name:22} {cost.wall:7.1f} s wall, {cost.cpu:6.1f} s CPU here")
    if measured.processes:
        peaks = ", ".join(f"{peak / 1e6:.0f}" for _, peak in measured.processes.values())
        print(f"    on the pool: {measured.pool_cpu:.1f} s CPU; peak memory {peaks} MB")
    rows = ", ".join(f"{count} {table}" for table, count in sorted(measured.rows.items()))
    print(f"    database rows: {sum(measured.rows.values())} ({rows})")


def _print_stages(stages: dict[str, float]) -> None:
    print("    stages: " + ", ".join(f"{name} {value:.1f} s" for name, value in stages.items()))


@contextmanager
def _pool(folder: Path) -> Generator[None]:
    """Deploy the flows and an empty one, and run a worker."""
    empty = folder / "empty_flow.py"
    empty.write_text("from prefect import flow\n\n\n@flow\ndef empty() -> None: ...\n")
    for arguments in (
        ["work-pool", "create", "agl", "--type", "process", "--overwrite"],
        ["deploy", "--all"],
    ):
        _prefect(arguments, Path.cwd())
    _prefect(["deploy", f"{empty.name}:empty", "--name", "empty", "--pool", "agl"], folder)
    worker = [PREFECT, "worker", "start", "--pool", "agl", "--type", "process"]
    env = {**os.environ, "PREFECT_WORKER_QUERY_SECONDS": "1"}
    with spawn(worker, folder / "worker.log", env):
        yield


def _prefect(arguments: list[str], folder: Path) -> None:
    command = [PREFECT, "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def main() -> None:
    """Print walls, CPU, memory and rows for each number of rollouts."""
    parser = argparse.ArgumentParser(description="What the fan-out costs beside Prefect itself.")
    parser.add_argument("rollouts", nargs="*", type=int, default=[512, 2048])
    numbers: list[int] = parser.parse_args().rollouts
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        os.environ |= CLIENT_SETTINGS | {
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        }
        with prefect_server(folder / "home", port), _pool(folder):
            meter = Meter(folder / "home" / "prefect.db")
            _warm_up()
            for rollouts in numbers:
                compare(meter, str(folder / "ledger"), rollouts)


def _warm_up() -> None:
    """Load torch, VERL and Prefect, and let the server make its first rows."""
    importlib.import_module("agl_core.algorithm.verl.worker")  # 10 s
    measure_bare_flow(8)


if __name__ == "__main__":
    main()
