"""What a trainer gives to its strategy: the algorithm, and a runner for each worker.

Both are values that pickle where their parts do, so that a process may be spawned with them.
"""

import asyncio
import copy
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agl_core.algorithm.base import Algorithm
from agl_core.execution.events import ExecutionEvent
from agl_core.litagent.litagent import LitAgent
from agl_core.runner.agent import LitAgentRunner
from agl_core.runner.base import EVENT_POLL_SECONDS, Runner
from agl_core.runner.execution import LeakCounter, run_in_thread
from agl_core.store.base import LightningStore
from agl_core.tracer.base import Tracer
from agl_core.tracer.otel import OtelTracer
from agl_core.trainer.init_utils import build_component
from agl_core.types.core import Dataset, Hook

if TYPE_CHECKING:  # the trainer builds on this module
    from agl_core.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""Between two looks at an empty queue; a hundred runners ask 200 times a second then."""


@dataclass(frozen=True)
class AlgorithmWork:
    """The algorithm of one `fit`."""

    algorithm: Algorithm | None
    """None where only runners are wanted: it waits until the work is over."""
    train_dataset: Dataset[Any] | None
    val_dataset: Dataset[Any] | None
    adapter: Any
    initial_resources: Any
    llm_proxy: Any
    trainer: "Trainer"

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None:
        """Give the algorithm what it works with, and run it."""
        algorithm, proxy = self.algorithm, self.llm_proxy
        if algorithm is None:
            while not event.is_set():  # noqa: ASYNC110 - another thread or process sets it
                await asyncio.sleep(EVENT_POLL_SECONDS)
            return
        algorithm.set_trainer(self.trainer)
        algorithm.set_store(store)
        algorithm.set_adapter(self.adapter)
        if self.initial_resources is not None:
            algorithm.set_initial_resources(self.initial_resources)
        if proxy is not None:
            proxy.set_store(store)
        algorithm.set_llm_proxy(proxy)
        was_running = proxy is not None and proxy.is_running()
        try:
            await self._run(algorithm)
        finally:
            if proxy is not None and proxy.is_running() and not was_running:
                await proxy.stop()

    async def _run(self, algorithm: Algorithm) -> None:
        datasets = {"train_dataset": self.train_dataset, "val_dataset": self.val_dataset}
        if algorithm.is_async():
            await algorithm.run(**datasets)
            return
        try:
            await run_in_thread(lambda: algorithm.run(**datasets), None, LeakCounter())
        except asyncio.CancelledError:
            logger.warning(
                "%s.run is not async, so it cannot be stopped; its thread ends with the process",
                type(algorithm).__name__,
            )
            raise


@dataclass(frozen=True)
class RunnerWork:
    """The runner of each worker, made from what the user gave.

    Where that is an instance, all workers of a process share the tracer (it keeps attempts apart),
    and each worker but the first has a copy of the runner (it knows its worker and its store).
    """

    agent: LitAgent[Any]
    runner: Any
    tracer: Any
    hooks: Sequence[Hook]
    max_rollouts: int | None
    trainer: "Trainer"

    def preload(self) -> None:
        """Load what every runner will need; processes that are forked afterwards share it."""
        importlib.import_module("agl_core.store.client")
        if getattr(self.trainer.tracer, "instrument_openai", False):
            importlib.import_module("openai.resources.chat.completions")

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        """Run rollouts as one worker until the event is set."""
        runner = self._runner_of(worker_id, store)
        self.agent.set_trainer(self.trainer)
        with runner.run_context(
            agent=self.agent, store=store, hooks=self.hooks, worker_id=worker_id
        ):
            await runner.iter(event=event)

    def _runner_of(self, worker_id: int, store: LightningStore) -> Runner[Any]:
        if isinstance(self.runner, Runner):
            return self.runner if worker_id == 0 else copy.copy(self.runner)
        is_thread_safe = store.capabilities.get("thread_safe", False)
        return make_runner(
            self.runner, make_tracer(self.tracer), self.max_rollouts, is_thread_safe=is_thread_safe
        )


def make_tracer(spec: Any) -> Tracer:
    """Return a tracer from what the user gave for it; an `OtelTracer` where that is nothing.

    Raises:
        ValueError: It cannot be made from that.
    """
    tracer = build_component(
        spec, expected_type=Tracer, spec_name="tracer", default_factory=OtelTracer
    )
    assert tracer is not None, "there is a default"
    return tracer


def make_runner(
    spec: Any, tracer: Tracer, max_rollouts: int | None, *, is_thread_safe: bool = False
) -> Runner[Any]:
    """Return a runner from what the user gave for it; a `LitAgentRunner` where that is nothing.

    Args:
        spec: What the user gave.
        tracer: For runners that are made here.
        max_rollouts: The same.
        is_thread_safe: Whether the store is; leases are then renewed by a thread, also while an
            async agent blocks its event loop.

    Raises:
        ValueError: It cannot be made from that.
    """

    def default() -> Runner[Any]:
        return LitAgentRunner(
            tracer,
            max_rollouts,
            poll_interval=_POLL_SECONDS,
            interval_jitter=_POLL_SECONDS / 5,
            heartbeat_launch_mode="thread" if is_thread_safe else "asyncio",
        )

    runner = build_component(
        spec,
        expected_type=Runner,
        spec_name="runner",
        default_factory=default,
        optional_defaults={"tracer": tracer, "max_rollouts": max_rollouts},
        dict_requires_type=False,
        dict_default_cls=LitAgentRunner,
    )
    assert runner is not None, "there is a default"
    return runner
