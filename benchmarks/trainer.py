"""What a trainer costs: rollouts that do nothing, under each strategy.

The client-server strategy has two runner processes and the store's server in the algorithm's. Each
case is a process of its own that imports, sets up, runs and ends: the time of the whole, the CPU
time of all its processes, the time from the enqueueing on, and from when the first rollout was
taken. Ratios are to threads in one process. Another package can be measured beside it: a further
entry of `CASES` is a command that prints the same JSON.

python -m benchmarks.trainer
"""

import asyncio
import json
import resource
import subprocess
import sys
import time
from typing import Any

from agl_core.algorithm.base import Algorithm
from agl_core.litagent import rollout
from agl_core.trainer import Trainer
from agl_core.types.core import EnqueueRolloutRequest
from agl_core.types.resources import LLM

ROLLOUTS, RUNNERS = 256, 2
LIMIT_SECONDS = 300

STRATEGIES: dict[str, dict[str, Any]] = {
    "threads (shm)": {"type": "shm", "main_thread": "algorithm"},
    "processes (cs, fork)": {"type": "cs", "server_port": 0, "start_method": "fork"},
    "processes (cs, spawn)": {"type": "cs", "server_port": 0, "start_method": "spawn"},
}
CASES = {
    name: [sys.executable, "-m", "benchmarks.trainer", json.dumps(strategy)]
    for name, strategy in STRATEGIES.items()
}


@rollout
async def nothing(task: Any, llm: LLM) -> float:
    """Return a reward."""
    return float(task)


class Enqueues(Algorithm):
    """Enqueue all rows at once, and wait for their ends."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Print how long that took."""
        store = self.get_store()
        await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:9", model="none")})
        requests = [EnqueueRolloutRequest(input=row) for row in train_dataset]
        started = time.perf_counter()
        ids = [one.rollout_id for one in await store.enqueue_many_rollouts(requests)]
        ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=LIMIT_SECONDS)
        seconds = time.perf_counter() - started
        assert [one.status for one in ended] == ["succeeded"] * ROLLOUTS
        first = min(one.attempt.start_time for one in ended)  # pyright: ignore
        last = max(one.end_time or 0.0 for one in ended)
        print(json.dumps({"rollouts": seconds, "first to last": last - first}), flush=True)


def run_case(strategy: dict[str, Any]) -> None:
    """Be the process of one case."""
    Trainer(algorithm=Enqueues(), strategy=strategy, n_runners=RUNNERS).fit(
        nothing, list(range(ROLLOUTS))
    )


def cpu_seconds() -> float:
    """Return the CPU time of the processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def main() -> None:
    """Print each case, and its ratio to the first one."""
    base: tuple[float, float] | None = None
    for name, command in CASES.items():
        started, cpu_before = time.perf_counter(), cpu_seconds()
        done = subprocess.run(  # noqa: ASYNC221 - nothing else runs meanwhile
            command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
        whole, cpu = time.perf_counter() - started, cpu_seconds() - cpu_before
        if done.returncode:
            print(f"{name:24} did not finish: {done.stderr.strip().splitlines()[-1:]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        base = base or (whole, cpu)
        print(
            f"{name:22} {ROLLOUTS} rollouts, {RUNNERS} runners: {whole:6.2f} s "
            f"({whole / base[0]:.2f}x), CPU {cpu:6.2f} s ({cpu / base[1]:.2f}x), from the "
            f"enqueueing {found['rollouts']:6.2f} s, from the first {found['first to last']:6.2f} s"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_case(json.loads(sys.argv[1]))
    else:
        asyncio.run(main())
