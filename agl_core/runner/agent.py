"""The runner that works for a store: it takes rollouts, runs the agent, and says how that ended.

Several rollouts run at once where `concurrency` allows it; each has a trace, a deadline and a lease
of its own (`agl_core.runner.stored_attempt`). A process that is killed says nothing: the leases
expire, and the store queues the rollouts again where their config says so. What it reports late
changes nothing.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from agl_core.errors import ConfigError, TransientError
from agl_core.litagent.litagent import LitAgent
from agl_core.runner.base import EVENT_POLL_SECONDS, Runner, StopEvent, is_set
from agl_core.runner.execution import LeakCounter
from agl_core.runner.heartbeat import Heartbeat, LaunchMode
from agl_core.runner.hooks import AgentHooks, overrides_hooks
from agl_core.runner.queue import RolloutQueue
from agl_core.runner.recording import RecordingProxies
from agl_core.runner.stored_attempt import StoredAttempts
from agl_core.store.base import LightningStore
from agl_core.store.older import with_later_methods
from agl_core.tracer.base import Tracer
from agl_core.types.core import AttemptedRollout, Hook, Rollout, RolloutMode
from agl_core.types.resources import NamedResources
from agl_core.utils.system_snapshot import check_gpu_snapshot

logger = logging.getLogger(__name__)

T_task = TypeVar("T_task")


class LitAgentRunner(Runner[T_task]):
    """Runs a `LitAgent` on the rollouts of a store.

    Args:
        tracer: Records what the agent does.
        max_rollouts: After how many `iter` returns; None for no limit.
        poll_interval: Seconds between two looks at an empty queue.
        heartbeat_interval: Seconds between two reports about this machine; 0 or less for none.
            Leases are renewed in any case (`agl_core.runner.heartbeat`).
        interval_jitter: Seconds by which each interval is longer or shorter, at most.
        heartbeat_launch_mode: "thread" keeps leases alive also while an async agent blocks the
            event loop; it needs a thread-safe store.
        heartbeat_include_gpu: Whether reports have the GPUs; needs `nvidia-smi`.
        concurrency: How many rollouts run at once.
        max_leaked_threads: How many sync agents may run on after their deadline or cancellation
            before `iter` takes no more rollouts; a thread cannot be killed.

    Raises:
        ConfigError: A number is out of its range, the mode is unknown, or there is no `nvidia-smi`.
    """

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: LaunchMode = "asyncio",
        heartbeat_include_gpu: bool = False,
        concurrency: int = 1,
        max_leaked_threads: int = 8,
    ) -> None:
        _check(
            max_rollouts=(max_rollouts is None or max_rollouts >= 0, max_rollouts),
            poll_interval=(poll_interval >= 0, poll_interval),
            interval_jitter=(interval_jitter >= 0, interval_jitter),
            heartbeat_launch_mode=(
                heartbeat_launch_mode in get_args(LaunchMode),
                heartbeat_launch_mode,
            ),
            concurrency=(concurrency >= 1, concurrency),
            max_leaked_threads=(max_leaked_threads >= 0, max_leaked_threads),
        )
        if heartbeat_include_gpu:
            check_gpu_snapshot()
        self.tracer = tracer
        self.max_rollouts = max_rollouts
        self.poll_interval = poll_interval
        self.heartbeat_interval = heartbeat_interval
        self.interval_jitter = interval_jitter
        self.heartbeat_launch_mode: LaunchMode = heartbeat_launch_mode
        self.heartbeat_include_gpu = heartbeat_include_gpu
        self.concurrency = concurrency
        self.max_leaked_threads = max_leaked_threads
        self.leaks = LeakCounter()
        """Agents that run on after their deadline or cancellation."""
        self._agent: LitAgent[T_task] | None = None
        self._hooks: list[Hook] = []
        self._store: LightningStore | None = None
        self._proxies: RecordingProxies | None = None

    def init(
        self, agent: LitAgent[T_task], *, hooks: Sequence[Hook] | None = None, **kwargs: Any
    ) -> None:
        """Set up before the workers start.

        Args:
            agent: What is run.
            hooks: Called around each attempt, in this order.
            kwargs: None are known.

        Raises:
            TypeError: The agent is no `LitAgent`, or there is an unknown argument.
            ConfigError: The agent has a sync method that would never run, since it is async.
        """
        if kwargs:
            raise TypeError(f"init() got unknown arguments: {', '.join(kwargs)}")
        if not isinstance(agent, LitAgent):
            raise TypeError(f"not a LitAgent: {agent!r}; is the function decorated with @rollout?")
        agent.check_methods()
        self._agent = agent
        self._hooks = list(hooks or ())
        if overrides_hooks(agent):
            self._hooks.append(AgentHooks())
        agent.set_runner(self)
        self.tracer.init()
        for hook in self._hooks:
            hook.init()

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Set up in one worker.

        Args:
            worker_id: Number of the worker, from 0.
            store: Where rollouts are from and results go.
            kwargs: None are known.

        Raises:
            TypeError: There is an unknown argument.
        """
        if kwargs:
            raise TypeError(f"init_worker() got unknown arguments: {', '.join(kwargs)}")
        self.worker_id = worker_id
        self._store = store
        self._proxies = RecordingProxies(self.tracer)
        self.tracer.init_worker(worker_id, store)
        for hook in self._hooks:
            hook.init_worker(worker_id)

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""
        self.worker_id = None
        self._store = None
        if self._proxies is not None:
            self._proxies.close()
            self._proxies = None
        if self.leaks.threads or self.leaks.tasks:
            logger.warning(
                "%d threads and %d tasks of agents still run: worker=%d",
                self.leaks.threads,
                self.leaks.tasks,
                worker_id,
            )
        self.tracer.teardown_worker(worker_id)
        for hook in self._hooks:
            hook.teardown_worker(worker_id)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""
        hooks, self._hooks, self._agent = self._hooks, [], None
        self.tracer.teardown()
        for hook in hooks:
            hook.teardown()

    def get_agent(self) -> LitAgent[T_task]:
        """Return the agent.

        Raises:
            ValueError: The runner is not set up.
        """
        if self._agent is None:
            raise ValueError(
                "Agent not initialized. Call init() first: the runner has no "
                "agent; call init(agent) first"
            )
        return self._agent

    def get_store(self) -> LightningStore:
        """Return the store.

        Raises:
            ValueError: The runner is not set up in a worker.
        """
        if self._store is None:
            raise ValueError(
                "Store not initialized. Call init_worker() first: the runner has "
                "no store; call init_worker(worker_id, store) first"
            )
        return self._store

    def get_worker_id(self) -> str:
        """Return the name of the worker in the store.

        Raises:
            ValueError: The runner is not set up in a worker.
        """
        if self.worker_id is None:
            raise ValueError(
                "Worker not initialized. Call init_worker() first: the runner has "
                "no worker; call init_worker(worker_id, store) first"
            )
        return f"Worker-{self.worker_id}"

    async def iter(self, *, event: StopEvent | None = None) -> None:
        """Run rollouts of the store until told to stop; an empty queue is waited for.

        An attempt that cannot be recorded is logged, and the runner goes on: the store ends it when
        its lease expires.

        Args:
            event: Set from elsewhere to stop; rollouts under way are finished.

        Raises:
            ValueError: The runner is not set up.
            StoreError: The store refuses to give rollouts; those under way are cancelled.
            TransientError: More than `max_leaked_threads` agents run on; rollouts under way were
                finished, and another process has to go on.
        """
        running: set[asyncio.Task[None]] = set()
        async with self._heartbeat() as heartbeat:
            try:
                await self._take_rollouts(running, heartbeat, event)
                if running:
                    await asyncio.wait(running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _take_rollouts(
        self, running: set[asyncio.Task[None]], heartbeat: Heartbeat, event: StopEvent | None
    ) -> None:
        """Start rollouts as tasks, as many at once as may run, until there shall be no more.

        Raises:
            TransientError: Too many threads leaked.
        """
        attempts, queue, num_taken = self._attempts(), self._queue(), 0
        while not is_set(event) and (self.max_rollouts is None or num_taken < self.max_rollouts):
            if (num_leaked := self.leaks.threads) > self.max_leaked_threads:
                if running:
                    await asyncio.wait(running)
                raise TransientError(
                    f"{self.get_worker_id()}: {num_leaked} agents still run past the end of their "
                    f"attempts (max_leaked_threads is {self.max_leaked_threads}); threads cannot "
                    "be killed, so this runner takes no more rollouts; start it in a new process"
                )
            if len(running) >= self.concurrency:
                await asyncio.wait(
                    running, timeout=EVENT_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            elif rollout := await queue.take(event):
                task = asyncio.create_task(_run(attempts, rollout, heartbeat))
                running.add(task)
                task.add_done_callback(running.discard)
                num_taken += 1

    async def step(
        self,
        input: T_task,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: StopEvent | None = None,
    ) -> Rollout:
        """Run the agent once on an input and return the rollout as the store has it then.

        Args:
            input: The task.
            resources: Published for it; None for the latest of the store.
            mode: What it is for.
            event: Set from elsewhere to cancel the agent.

        Raises:
            Exception: Whatever the agent raised.
            TimeoutError: It did not return in time.
            RuntimeError: There are no resources, or the store has lost the rollout.
            ValueError: The runner is not set up.
        """
        attempts, store = self._attempts(), self.get_store()
        resources_id = None
        if resources is not None:
            resources_id = (await store.add_resources(resources)).resources_id
        rollout = await store.start_rollout(
            input, mode=mode, resources_id=resources_id, worker_id=self.get_worker_id()
        )
        async with self._heartbeat() as heartbeat:
            ending = await attempts.run(rollout, heartbeat, event)
        if ending.error is not None:
            raise ending.error
        finished = await store.get_rollout_by_id(rollout.rollout_id)
        if finished is None:
            raise RuntimeError(
                f"Failed to fetch completed rollout by id after step: {rollout.rollout_id}"
            )
        return finished

    def _attempts(self) -> StoredAttempts:
        agent, store = self.get_agent(), with_later_methods(self.get_store())
        assert self._proxies is not None, "they are set with the store"
        return StoredAttempts(
            agent=agent,
            runner=self,
            tracer=self.tracer,
            store=store,
            hooks=self._hooks,
            leaks=self.leaks,
            proxies=self._proxies,
        )

    def _queue(self) -> RolloutQueue:
        return RolloutQueue(
            with_later_methods(self.get_store()),
            self.get_worker_id(),
            poll_interval_seconds=self.poll_interval,
            jitter_seconds=self.interval_jitter,
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            with_later_methods(self.get_store()),
            self.get_worker_id(),
            interval_seconds=self.heartbeat_interval,
            jitter_seconds=self.interval_jitter,
            include_gpu=self.heartbeat_include_gpu,
            launch_mode=self.heartbeat_launch_mode,
        )


async def _run(attempts: StoredAttempts, rollout: AttemptedRollout, heartbeat: Heartbeat) -> None:
    """Run one attempt; the runner outlives an error of the store."""
    try:
        await attempts.run(rollout, heartbeat)
    except Exception:
        logger.exception(
            "the end of an attempt could not be recorded: rollout=%s attempt=%s",
            rollout.rollout_id,
            rollout.attempt.attempt_id,
        )


def _check(**settings: tuple[bool, Any]) -> None:
    for name, (is_valid, value) in settings.items():
        if not is_valid:
            known = f"Unsupported {name.replace('_', ' ')}: {value}: "
            raise ConfigError(f"{known}LitAgentRunner: {name} cannot be {value!r}")
