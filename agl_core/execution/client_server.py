"""Runners in processes of their own, which meet the algorithm in a store's server.

    role both        trainer's process: store's server, algorithm --+-- supervisor -- runners
    role algorithm   trainer's process: store's server, algorithm
    role runner      trainer's process: supervisor of runners, anywhere the server can be reached

With `main_process="runner"` the algorithm is a process and the one runner is here, for a debugger.
"""

import logging
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from multiprocessing import get_context
from typing import Literal, cast, get_args

from agl_core.env_var import LightningEnvVar, resolve_bool_env_var, resolve_int_env_var
from agl_core.env_var import resolve_str_env_var as resolve_str
from agl_core.errors import ConfigError
from agl_core.execution.algorithm_process import run_with_runner_here
from agl_core.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from agl_core.execution.events import MultiprocessingEvent, ThreadingEvent
from agl_core.execution.loops import AlgorithmStopped, attend, run_to_end
from agl_core.execution.runner_processes import (
    CrashPolicy,
    RunnerProcesses,
    RunnerSettings,
    StartMethod,
    Work,
    preload,
)
from agl_core.execution.signals import interrupts_wait, sigterm_interrupts
from agl_core.execution.spawning import check_picklable
from agl_core.execution.store_answers import await_answer, check_shared
from agl_core.execution.supervisor import Supervisor
from agl_core.store.base import LightningStore
from agl_core.store.wire import DEFAULT_PORT

logger = logging.getLogger(__name__)

Role = Literal["algorithm", "runner", "both"]
MainProcess = Literal["algorithm", "runner"]


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Runners as processes of this machine, or of others; registry name `cs`.

    A managed store is served by the process that has the algorithm, and runners are its clients;
    one that is not managed is used as it is (`LightningStoreClient`, `SqliteLightningStore`).
    Runners that belong to an algorithm here refuse any other store that they meet at its address.

    Args:
        role: Of this process: "algorithm", "runner" or "both"; None for `AGL_CURRENT_ROLE`, else
            both.
        server_host: Where the managed store listens, or is found by runners; None for
            `AGL_SERVER_HOST`, else loopback. Another address needs `AGL_STORE_TOKEN`.
        server_port: None for `AGL_SERVER_PORT`, else 4747; 0 for a free one (role both).
        n_runners: How many runners this process starts.
        graceful_timeout: Seconds that runners have to end by themselves, rollouts under way
            included, once the algorithm has ended.
        terminate_timeout: Seconds that they have after SIGINT, and after SIGTERM, before the next
            step, the last of which is SIGKILL.
        main_process: Which of the two stays in this process (role both); "runner" needs one runner.
        managed_store: Whether to serve the store; None for `AGL_MANAGED_STORE`, else yes.
        allowed_exit_codes: Of runners; any other is a crash.
        start_method: "fork" or "spawn"; None for fork on Linux, spawn elsewhere.
        on_runner_crash: "restart", or "end" the run with an error.
        max_restarts: Of each runner; the crash after them ends the run with an error.
        connect_timeout: Seconds to wait for a store elsewhere to answer.

    Raises:
        ValueError: A value that cannot be honoured.
    """

    alias = "cs"

    def __init__(
        self,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: MainProcess = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: Sequence[int] = (0, -15),
        *,
        start_method: StartMethod | None = None,
        on_runner_crash: CrashPolicy = "restart",
        max_restarts: int = 3,
        connect_timeout: float = 60.0,
    ) -> None:
        env = LightningEnvVar
        self.role = cast(Role, resolve_str(env.AGL_CURRENT_ROLE, role, "both"))
        self.server_host = resolve_str(env.AGL_SERVER_HOST, server_host, "127.0.0.1") or "127.0.0.1"
        port = resolve_int_env_var(env.AGL_SERVER_PORT, server_port, DEFAULT_PORT)
        self.server_port = DEFAULT_PORT if port is None else port
        self.n_runners = n_runners
        self.graceful_timeout = graceful_timeout
        self.terminate_timeout = terminate_timeout
        self.main_process: MainProcess = main_process
        self.managed_store = resolve_bool_env_var(env.AGL_MANAGED_STORE, managed_store, True)
        self.allowed_exit_codes = tuple(allowed_exit_codes)
        default: StartMethod = "fork" if sys.platform == "linux" else "spawn"
        self.start_method: StartMethod = start_method or default
        self.on_runner_crash: CrashPolicy = on_runner_crash
        self.max_restarts = max_restarts
        self.connect_timeout = connect_timeout
        self._check()

    def _check(self) -> None:
        for name, value, allowed in (
            ("role", self.role, get_args(Role)),
            ("main_process", self.main_process, get_args(MainProcess)),
            ("start_method", self.start_method, get_args(StartMethod)),
            ("on_runner_crash", self.on_runner_crash, get_args(CrashPolicy)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be {_either(allowed)}; got {value!r}")
        for name, number, least in (
            ("n_runners", self.n_runners, 1),
            ("graceful_timeout", self.graceful_timeout, 0),
            ("terminate_timeout", self.terminate_timeout, 0),
            ("max_restarts", self.max_restarts, 0),
            ("connect_timeout", self.connect_timeout, 0),
            ("server_port", self.server_port, 0),
        ):
            if number < least:
                raise ConfigError(f"{name} must be at least {least}; got {number!r}")
        if self.main_process == "runner" and (self.role != "both" or self.n_runners != 1):
            raise ConfigError(
                "main_process='runner' is only supported when role='both', and "
                "main_process='runner' requires n_runners to be 1; here are role "
                f"{self.role!r} and {self.n_runners} runners"
            )
        if self.role == "runner" and self.managed_store and self.server_port == 0:
            raise ConfigError("a runner needs the port of its algorithm's store; 0 names none")

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run what this process has of the two, and return when that has ended.

        Args:
            algorithm: Run once, by the process with that role.
            runner: Run by each runner.
            store: What they share; not used by role runner where the store is managed.

        Raises:
            Exception: What the algorithm raised.
            ExecutionError: The runners failed.
            ConfigError: The store cannot be shared or served, or a bundle cannot be sent.
            TransientError: No store answered in time.
            KeyboardInterrupt: Ctrl-C; all processes have been ended. SIGTERM is `SystemExit`.
        """
        if self.role == "both" and not self.managed_store:
            check_shared(store)
        with sigterm_interrupts():
            if self.role == "algorithm":
                event = ThreadingEvent()
                run_to_end(lambda: self._run_algorithm(algorithm, store, event))
            elif self.role == "runner":
                self._run_runners(runner, store)
            elif self.main_process == "runner":
                run_with_runner_here(
                    self.settings,
                    self._work(algorithm, store),
                    runner,
                    lambda: self._serving(store),
                )
            else:
                self._run_both(algorithm, runner, store)

    async def _run_algorithm(
        self, algorithm: AlgorithmBundle, store: LightningStore, event: ThreadingEvent
    ) -> None:
        if not self.managed_store:
            await await_answer(store, self.connect_timeout)
        async with self._serving(store) as (ours, _):
            await attend(
                algorithm(ours, event),
                event,
                name="the algorithm",
                grace_seconds=self.graceful_timeout,
                must_finish=True,
            )

    def _run_runners(self, runner: RunnerBundle, store: LightningStore) -> None:
        """Supervise runners here, for a store that is elsewhere."""
        probe = store
        if self.managed_store:
            from agl_core.store.client import LightningStoreClient

            host = f"[{self.server_host}]" if ":" in self.server_host else self.server_host
            store = LightningStoreClient(f"http://{host}:{self.server_port}")
            probe = LightningStoreClient(store.server_address, retry_delays=())
        check_shared(store)
        work = Work(runner, store)
        self._check_sent(work)
        run_to_end(lambda: await_answer(probe, self.connect_timeout))
        event = MultiprocessingEvent(get_context(self.start_method))
        packed = work.packed(self.start_method)
        preload(packed)
        try:
            RunnerProcesses(self.settings, packed, None, event).run()
        finally:
            event.close()

    def _run_both(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        work = self._work(runner, store)
        event = MultiprocessingEvent(get_context(self.start_method))
        with ExitStack() as at_end:
            at_end.callback(event.close)
            with interrupts_wait():
                supervisor = Supervisor(self.settings, work, event)
                at_end.callback(supervisor.kill)
            try:
                run_to_end(lambda: self._lead(supervisor, algorithm, store, event))
            except AlgorithmStopped:
                supervisor.verify()
                raise
            supervisor.verify()

    async def _lead(
        self,
        supervisor: Supervisor,
        algorithm: AlgorithmBundle,
        store: LightningStore,
        event: MultiprocessingEvent,
    ) -> None:
        """Serve the store, let the runners begin, run the algorithm, and end the runners."""
        async with self._serving(store) as (ours, theirs):
            supervisor.begin(theirs)
            try:
                await attend(
                    algorithm(ours, event),
                    event,
                    name="the algorithm",
                    grace_seconds=self.graceful_timeout,
                    must_finish=True,
                    check=lambda: supervisor.check(ours),
                )
            finally:
                event.set()
                await supervisor.ended()

    def _work(self, bundle: AlgorithmBundle | RunnerBundle, store: LightningStore) -> Work:
        """Return a bundle for another process, which is told a managed store later.

        Raises:
            ConfigError: It cannot be sent there.
        """
        work = Work(bundle, None if self.managed_store else store)
        self._check_sent(work)
        return work

    def _check_sent(self, work: Work) -> None:
        if self.start_method == "spawn":
            check_picklable(work.bundle)

    @property
    def settings(self) -> RunnerSettings:
        """How many runners there are, and what becomes of them."""
        return RunnerSettings(
            n_runners=self.n_runners,
            start_method=self.start_method,
            on_crash=self.on_runner_crash,
            max_restarts=self.max_restarts,
            graceful_seconds=self.graceful_timeout,
            terminate_seconds=self.terminate_timeout,
            allowed_exit_codes=self.allowed_exit_codes,
        )

    @asynccontextmanager
    async def _serving(
        self, store: LightningStore
    ) -> AsyncGenerator[tuple[LightningStore, LightningStore | None]]:
        """Serve a managed store while the block runs.

        Yields:
            The store for this process, and the one to tell other processes; None where they have
            it.
        """
        if not self.managed_store:
            yield store, None
            return
        from agl_core.store.server import LightningStoreServer  # a web server, only where needed

        async with LightningStoreServer(store, self.server_host, self.server_port) as server:
            logger.info("the store is served at %s", server.endpoint)
            yield server, server.client()


def _either(values: Sequence[str]) -> str:
    """Return 'a' or 'b'; or one of 'a', 'b', or 'c'."""
    *first, last = map(repr, values)
    if len(first) == 1:
        return f"{first[0]} or {last}"
    return f"one of {', '.join(first)}, or {last}"
