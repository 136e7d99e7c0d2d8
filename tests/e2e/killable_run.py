"""A training run in a process of its own: to be killed from outside, or by itself (SIGKILL) at a
chosen write to the ledger.

Its process is forked from a server that has imported everything: importing VERL takes many seconds,
and these tests start runs by the dozen.
"""

import asyncio
import atexit
import multiprocessing
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from prefect.settings import PREFECT_API_URL, temporary_settings

from agl_core.config import RunConfig
from agl_core.ledger.local_storage import LocalStorage
from agl_core.ledger.s3_storage import S3Storage
from flows import shard_runs
from flows.training_run import training_run


def kill_before_writing(pattern: str) -> None:
    def dies_at(write: Any) -> Any:
        def write_or_die(self: Any, key: str, *args: Any) -> None:
            if re.search(pattern, key):
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, key, *args)

        return write_or_die

    LocalStorage._publish = dies_at(LocalStorage._publish)
    S3Storage._create = dies_at(S3Storage._create)


def _child(
    config_json: str, log: str, dies_at: str, lost_seconds: float | None, url: str | None
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if dies_at:
        kill_before_writing(dies_at)
    if lost_seconds is not None:
        shard_runs._LOST_SECONDS = lost_seconds
    try:
        with ExitStack() as settings:
            if url is not None:
                settings.enter_context(temporary_settings({PREFECT_API_URL: url}))
            asyncio.run(training_run(RunConfig.model_validate_json(config_json)))
    finally:
        atexit._run_exitfuncs()  # as any interpreter ends; one that was forked leaves them out


class KillableRun:
    """A run that has been started; leaving the `with` block kills it if it still runs."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.e2e.killable_run", "tests.agents", "agl_core.algorithm.verl.worker"]
    )

    def __init__(
        self,
        config: RunConfig,
        log: Path,
        *,
        dies_at: str = "",
        lost_seconds: float | None = None,
        url: str | None = None,
    ) -> None:
        """Start it.

        Args:
            config: What to train.
            log: File that gets its output, appended.
            dies_at: Pattern that is matched against each key just before it is written to the
                ledger; where it matches, the process is killed. An empty one never matches.
            lost_seconds: After which a silent shard on the pool is replaced, if not as usual.
            url: Of the Prefect server's API, if not this process's.
        """
        log.touch()
        arguments = (config.model_dump_json(), str(log), dies_at, lost_seconds, url)
        self._process = self.context.Process(target=_child, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait(self, timeout_seconds: float) -> int:
        """Return its exit status once it has ended; a negative one is a signal's number."""
        self._process.join(timeout_seconds)
        assert self._process.exitcode is not None, f"still runs after {timeout_seconds:.0f} s"
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL it and wait for its end."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
