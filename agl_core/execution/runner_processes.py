"""Runners in processes of their own: started, restarted where they crash, ended in order.

    trainer's process --> supervisor --> runner 0, runner 1, ...

The supervisor is started before the trainer's process has threads of ours (the store's server), and
has none itself: it may fork at any time, so a crashed runner can be replaced also under `fork`. It
waits to be told the store. It ends its runners when the event is set, and when its parent is gone.
Where the trainer's process has nothing but runners it is the supervisor itself.
"""

import asyncio
import logging
import pickle
import signal
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from agl_core.errors import ExecutionError
from agl_core.execution.child import TICK_SECONDS, Child, end, is_orphan
from agl_core.execution.events import MultiprocessingEvent
from agl_core.execution.signals import interrupts_wait
from agl_core.store.base import LightningStore

logger = logging.getLogger(__name__)

CrashPolicy = Literal["restart", "end"]
StartMethod = Literal["fork", "spawn"]
_FAILED = "Subprocesses failed with unexpected exit codes"
_FIRST_RESTART_SECONDS = 0.5
_MAX_RESTART_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Work:
    """What the processes of a strategy run; pickled where they are spawned."""

    bundle: Any
    store: LightningStore | None
    """None where they are told it later."""

    def packed(self, method: StartMethod) -> "Work | bytes":
        """Return it as a process takes it; as bytes, its supervisor need not load it."""
        return pickle.dumps(self) if method == "spawn" else self

    @staticmethod
    def unpacked(work: "Work | bytes") -> "Work":
        """Return it as it was."""
        return pickle.loads(work) if isinstance(work, bytes) else work


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How many runners there are, and what becomes of them."""

    n_runners: int
    start_method: StartMethod
    on_crash: CrashPolicy
    max_restarts: int
    """For each runner."""
    graceful_seconds: float
    terminate_seconds: float
    allowed_exit_codes: tuple[int, ...]

    @property
    def end_seconds(self) -> float:
        """How long the end of all runners takes at most, with some room."""
        return self.graceful_seconds + 2 * self.terminate_seconds + 15.0


class RunnerProcesses:
    """The runners of one supervisor.

    Args:
        settings: What becomes of them.
        work: The runner's bundle.
        store: For the bundle; None for the one in `work`.
        event: Says that the work is over.
        parent_pid: Whose end is ours too; None for nobody's.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        work: "Work | bytes",
        store: LightningStore | None,
        event: MultiprocessingEvent,
        parent_pid: int | None = None,
    ) -> None:
        self._settings = settings
        self._context = get_context(settings.start_method)
        self._args = (work, store, event)
        self._event = event
        self._parent_pid = parent_pid
        self._running: dict[int, Child] = {}
        self._restarts: dict[int, int] = dict.fromkeys(range(settings.n_runners), 0)
        self._due: dict[int, float] = dict.fromkeys(range(settings.n_runners), 0.0)
        """When runners are to be started."""

    def run(self) -> None:
        """Run until the event is set, the parent is gone, or every runner has ended by itself.

        Raises:
            ExecutionError: A runner crashed and is not restarted (again), or ended wrongly when it
                was told to end; all have ended.
        """
        graceful = self._settings.graceful_seconds
        try:
            while (self._running or self._due) and not self._event.is_set():
                if self._parent_pid is not None and is_orphan(self._parent_pid):
                    logger.error("the trainer's process is gone; its runners are ended")
                    graceful = 0.0
                    break
                self._start_due()
                if self._running:
                    wait([child.sentinel for child in self._running.values()], TICK_SECONDS)
                else:
                    time.sleep(TICK_SECONDS)
                self._look()
        finally:
            told = list(self._running.values())
            if told:  # else all have ended by themselves, and the algorithm may go on
                self._event.set()
            problems = end(told, graceful, self._settings.terminate_seconds)
        problems += [
            one.description
            for one in told  # SIGINT ends a process that has not begun yet
            if not self._is_allowed(one) and one.exit_code != -signal.SIGINT
        ]
        if problems:
            raise ExecutionError(
                f"{_FAILED}: the runners did not end as they should: {'; '.join(problems)}"
            )

    def _start_due(self) -> None:
        now = time.monotonic()
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            args = (*self._args, number)
            with interrupts_wait():
                self._running[number] = Child(self._context, run_runner, args, f"runner {number}")

    def _look(self) -> None:
        """See which runners have ended, and what follows.

        Raises:
            ExecutionError: One crashed and is not restarted.
        """
        ended = {n: child for n, child in self._running.items() if child.exit_code is not None}
        for number, child in ended.items():
            del self._running[number]
            if self._is_allowed(child):
                logger.info("%s", child.description)
                continue
            self._restarts[number] += 1
            if self._settings.on_crash == "end":
                raise ExecutionError(
                    f"{_FAILED}: {child.description}; on_runner_crash='end' ends the run"
                )
            if self._restarts[number] > self._settings.max_restarts:
                raise ExecutionError(
                    f"{_FAILED}: {child.description}, after {self._settings.max_restarts} restarts "
                    "(max_restarts); the run ends"
                )
            pause = min(
                _FIRST_RESTART_SECONDS * 2 ** (self._restarts[number] - 1), _MAX_RESTART_SECONDS
            )
            logger.error("%s; it is restarted in %g s", child.description, pause)
            self._due[number] = time.monotonic() + pause

    def _is_allowed(self, child: Child) -> bool:
        return child.exit_code in self._settings.allowed_exit_codes


def run_runner(
    work: "Work | bytes", store: LightningStore | None, event: MultiprocessingEvent, number: int
) -> None:
    """Be a runner's process."""
    given = Work.unpacked(work)
    asyncio.run(given.bundle(store or given.store, number, event))


def supervise(
    settings: RunnerSettings,
    work: "Work | bytes",
    event: MultiprocessingEvent,
    told: Connection,
    parent_pid: int,
) -> None:
    """Be the supervisor's process: wait to be told the store, then run the runners.

    Raises:
        ExecutionError: See `RunnerProcesses.run`.
    """
    preload(work)
    store = await_store(told, event, parent_pid)
    if store is not None:
        RunnerProcesses(settings, work, store[0], event, parent_pid).run()


def preload(work: "Work | bytes") -> None:
    """Load what runners need once for all, where they are forked and their bundle knows how."""
    if isinstance(work, Work) and hasattr(work.bundle, "preload"):
        work.bundle.preload()


def await_store(
    told: Connection, event: MultiprocessingEvent, parent_pid: int
) -> "tuple[LightningStore | None] | None":
    """Return the store that the parent tells, None in it for the one that is known already; None
    where there is nothing to do any more.
    """
    while not told.poll(TICK_SECONDS):
        if event.is_set() or is_orphan(parent_pid):
            return None
    return (told.recv(),)
