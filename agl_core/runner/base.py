"""What a runner promises: it is set up once, then once in each worker, and runs rollouts there."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from agl_core.litagent.litagent import LitAgent
from agl_core.store.base import LightningStore
from agl_core.types.core import Hook, ParallelWorkerBase, Rollout, RolloutMode
from agl_core.types.resources import NamedResources

if TYPE_CHECKING:  # only named
    from agl_core.tracer.base import Tracer

logger = logging.getLogger(__name__)

T_task = TypeVar("T_task")


EVENT_POLL_SECONDS = 0.1
"""Between two looks at a `StopEvent`: another thread or process sets it."""


class StopEvent(Protocol):
    """Says when to stop; `threading.Event` and `multiprocessing.Event` are such."""

    def is_set(self) -> bool:
        """Tell whether to stop."""
        ...


def is_set(event: StopEvent | None) -> bool:
    """Tell whether there is an event and it says to stop."""
    return event is not None and event.is_set()


class Runner(ParallelWorkerBase, Generic[T_task]):
    """Runs an agent on rollouts; methods not overridden raise `NotImplementedError`."""

    tracer: "Tracer"
    """Records what the agent does."""

    def init(
        self,
        agent: LitAgent[T_task],
        *,
        hooks: Sequence[Hook] | None = None,
        **kwargs: Any,
    ) -> None:
        """Set up before the workers start.

        Args:
            agent: What is run.
            hooks: Called around each attempt, in this order.
            kwargs: Of the runner.
        """
        raise NotImplementedError

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Set up in one worker.

        Args:
            worker_id: Number of the worker, from 0.
            store: Where rollouts are from and results go.
            kwargs: Of the runner.
        """
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: runners are async.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "The behavior of run() of Runner is undefined. Use iter() or step() "
            "instead: both are async"
        )

    async def iter(self, *, event: StopEvent | None = None) -> None:
        """Run rollouts of the store until told to stop.

        Args:
            event: Set from elsewhere to stop; rollouts under way are finished.
        """
        raise NotImplementedError

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
        """
        raise NotImplementedError

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""

    @contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent[T_task],
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        worker_id: int | None = None,
    ) -> Generator[Self]:
        """Set the runner up for one worker and undo it at the end, for use without a trainer.

        Args:
            agent: What is run.
            store: Where rollouts are from and results go.
            hooks: Called around each attempt.
            worker_id: Number of the worker; None for 0.
        """
        number = 0 if worker_id is None else worker_id
        self.init(agent, hooks=hooks)
        try:
            self.init_worker(number, store)
            try:
                yield self
            finally:
                _undo(self.teardown_worker, number)
        finally:
            _undo(self.teardown)


def _undo(teardown: Any, *args: Any) -> None:
    """Log an error of a teardown: what happened before is the news."""
    try:
        teardown(*args)
    except Exception:
        logger.exception("%s failed", teardown.__qualname__)
