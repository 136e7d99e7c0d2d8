"""Algorithm and runners as threads of this process, each with an event loop of its own."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, get_args

from agl_core.env_var import LightningEnvVar, resolve_bool_env_var
from agl_core.errors import ConfigError
from agl_core.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from agl_core.execution.events import ThreadingEvent
from agl_core.execution.loops import AlgorithmStopped, attend, run_to_end
from agl_core.execution.queue_watch import QueueWatch, await_algorithm
from agl_core.execution.signals import sigterm_interrupts
from agl_core.store.base import LightningStore
from agl_core.store.threading import LightningStoreThreaded

logger = logging.getLogger(__name__)

MainThread = Literal["runner", "algorithm"]


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """One process, for debugging and notebooks; registry name `shm`.

    A crashed runner ends the run: a thread that went wrong cannot be replaced safely. A thread that
    does not end is left behind, and named in the log; it ends with the process.

    Args:
        n_runners: How many runners there are.
        main_thread: Which of the two runs in the caller's thread; None for the runner where there
            is one, else the algorithm. "runner" needs one runner.
        join_timeout: Seconds to wait for all threads once the work is over.
        graceful_delay: Seconds that an algorithm or runner has to end by itself before it is
            cancelled, and after that.
        poll_interval: Seconds between two looks at whether the work is over.
        managed_store: Whether to make the store thread-safe; None for `AGL_MANAGED_STORE`, else
            yes.

    Raises:
        ValueError: A value that cannot be honoured.
    """

    alias = "shm"

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: MainThread | None = None,
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
    ) -> None:
        if n_runners < 1:
            raise ConfigError(f"n_runners must be at least 1; got {n_runners!r}")
        if main_thread not in (None, *get_args(MainThread)):
            raise ConfigError(f"main_thread must be 'algorithm' or 'runner'; got {main_thread!r}")
        if main_thread == "runner" and n_runners != 1:
            raise ConfigError(
                "When main_thread is 'runner', n_runners must be 1. Either use 'algorithm' on the "
                f"main thread or set n_runners to 1; main_thread='runner' needs one runner; here "
                f"are {n_runners}"
            )
        for name, seconds in (
            ("join_timeout", join_timeout),
            ("graceful_delay", graceful_delay),
            ("poll_interval", poll_interval),
        ):
            if seconds < 0:
                raise ConfigError(f"{name} must be at least 0; got {seconds!r}")
        self.n_runners = n_runners
        self.main_thread: MainThread = main_thread or ("runner" if n_runners == 1 else "algorithm")
        self.join_timeout = join_timeout
        self.graceful_delay = graceful_delay
        self.poll_interval = poll_interval
        self.managed_store = resolve_bool_env_var(
            LightningEnvVar.AGL_MANAGED_STORE, managed_store, True
        )

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run both until the algorithm has ended.

        Args:
            algorithm: Run once.
            runner: Run by each runner.
            store: What they share.

        Raises:
            Exception: What the algorithm, or the first runner that failed, raised.
            ExecutionError: Every runner has ended, and rollouts are queued.
            ConfigError: The store is neither thread-safe nor managed.
            KeyboardInterrupt: Ctrl-C; the threads were told to end.
        """
        if self.managed_store:
            store = LightningStoreThreaded(store)
        elif not store.capabilities.get("thread_safe", False):
            raise ConfigError(f"{type(store).__name__} is not thread-safe; let it be managed")
        event = ThreadingEvent()

        def lead(**options: Any) -> Coroutine[Any, Any, None]:
            work = algorithm(store, event)
            return self._attended(work, event, "the algorithm", must_finish=True, **options)

        def assist(number: int, **options: Any) -> Coroutine[Any, Any, None]:
            work = runner(store, number, event)
            return self._attended(work, event, f"runner {number}", **options)

        with sigterm_interrupts():
            if self.main_thread == "algorithm":
                numbers = range(self.n_runners)
                threads = [_Thread(f"runner {n}", _bound(assist, n), event) for n in numbers]
                check = _check_of(threads, store)
                self._run(threads, lambda: lead(check=check), event)
            else:
                leader = _Thread("algorithm", lead, event, is_leader=True)
                self._run([leader], lambda: _assist(assist, leader, store), event)

    def _attended(
        self, work: Any, event: ThreadingEvent, name: str, **options: Any
    ) -> Coroutine[Any, Any, None]:
        return attend(
            work,
            event,
            name=name,
            grace_seconds=self.graceful_delay,
            tick_seconds=self.poll_interval,
            **options,
        )

    def _run(
        self,
        threads: "Sequence[_Thread]",
        main: Callable[[], Coroutine[Any, Any, None]],
        event: ThreadingEvent,
    ) -> None:
        """Run what is for this thread, beside the other threads, and end those."""
        for thread in threads:
            thread.start()
        stopped: AlgorithmStopped | None = None
        try:
            run_to_end(main)
        except AlgorithmStopped as error:
            stopped = error
        finally:
            event.set()
            until = time.monotonic() + self.join_timeout
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    logger.error(
                        "%s did not end within %g s and is left behind",
                        thread.name,
                        self.join_timeout,
                    )
        for thread in threads:
            thread.raise_error()
        if stopped is not None:
            raise stopped


class _Thread(threading.Thread):
    """A bundle in a daemon thread; its error sets the event, as does its end where it leads."""

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[Any, Any, None]],
        event: ThreadingEvent,
        *,
        is_leader: bool = False,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._main = main
        self._event = event
        self._is_leader = is_leader
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error
            self._event.set()
        if self._is_leader:
            self._event.set()

    def raise_error(self) -> None:
        """Raise what the bundle raised."""
        if self._error is not None:
            raise self._error


def _bound(
    assist: Callable[[int], Coroutine[Any, Any, None]], number: int
) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: assist(number)


def _check_of(
    threads: Sequence[_Thread], store: LightningStore
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return what looks whether there are runners for what is queued."""
    watch = QueueWatch()

    async def check() -> None:
        if not any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.raise_error()
            await watch.check(store)

    return check


async def _assist(
    assist: Callable[[int], Coroutine[Any, Any, None]], leader: _Thread, store: LightningStore
) -> None:
    await assist(0)
    await await_algorithm(lambda: not leader.is_alive(), store)
