"""One training run: in this process, or in one that may be killed."""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from agl_core import progress
from agl_core.config import RunConfig
from agl_core.progress import StageStarted

OnStage = Callable[[int, str], None]
"""Called with iteration and stage when the stage begins; the stage waits until it returns."""
STAGES = (
    *("propose", "publish", "rollout", "collect", "adapt", "update", "export", "evaluate"),
    "commit",
)


def stage_of(event: StageStarted) -> str:
    """Return the stage; the validation of a new version is one."""
    return "evaluate" if event.stage in ("rollout_new", "evaluate") else event.stage


def run_here(
    config: RunConfig, on_stage: OnStage = lambda iteration, stage: None
) -> BaseException | None:
    """Run in this process; return the error that it ended with."""
    from flows.training_run import training_run

    seen: set[tuple[int, str]] = set()

    def listener(event: progress.Event) -> None:
        if isinstance(event, StageStarted):
            now = event.iteration, stage_of(event)
            if now not in seen:
                seen.add(now)
                on_stage(*now)

    async def main() -> None:
        with progress.listen(listener):
            await training_run(config)

    try:
        asyncio.run(main())
    except Exception as error:  # noqa: BLE001 - how it ended is what is asked
        return error
    return None


@contextmanager
def in_thread(action: Callable[[], object]) -> Generator[None]:
    """Run an action beside the enclosed code, wait for it, and raise what it raised."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        yield
        future.result()


def _child(config_json: str, stages: Connection, log: str) -> None:
    """Run, and say each stage; a stage goes on once it was heard of."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

    def say(iteration: int, stage: str) -> None:
        stages.send((iteration, stage))
        stages.recv()

    error = run_here(RunConfig.model_validate_json(config_json), say)
    stages.close()
    if error is not None:
        sys.exit(f"{type(error).__name__}: {error}")


class Victim:
    """A training run in a process of its own, forked from one that has everything imported."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(
        ["tests.chaos.process", "flows.training_run", "agl_core.algorithm.verl.worker"]
    )

    def __init__(self, config: RunConfig, log: Path) -> None:
        self.log = log
        self._stages, theirs = self._context.Pipe()
        arguments = (config.model_dump_json(), theirs, str(log))
        self.process = self._context.Process(target=_child, args=arguments)
        self.process.start()
        theirs.close()

    def until(self, iteration: int, stage: str, timeout_seconds: float = 120.0) -> bool:
        """Let it run until a stage begins; False if it ended before."""
        try:
            while self._stages.poll(timeout_seconds):
                reached = self._stages.recv()
                self._stages.send(True)
                if reached == (iteration, stage):
                    return True
        except (EOFError, OSError):
            return False
        raise TimeoutError(f"no stage for {timeout_seconds} s: {self.log.read_text()[-2000:]}")

    def kill(self) -> int | None:
        """SIGKILL it and return its exit status."""
        self.process.kill()
        return self.ended()

    def ended(self, timeout_seconds: float = 60.0) -> int | None:
        """Wait for its end and return its exit status."""
        self.process.join(timeout_seconds)
        self._stages.close()
        return self.process.exitcode
