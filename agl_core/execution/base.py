"""What a strategy promises: it runs an algorithm and its runners, and ends both.

The two meet only in the store. The event says that the work is over: whoever sees it set comes to
an end. An error of the algorithm reaches whoever called `execute`; so does Ctrl-C, after everything
that was started has ended.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from agl_core.execution.events import ExecutionEvent
from agl_core.store.base import LightningStore


class AlgorithmBundle(Protocol):
    """An algorithm with all that it needs but the store."""

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None:
        """Run to the end, or until the event is set."""
        ...


class RunnerBundle(Protocol):
    """A runner with all that it needs but the store; called once for each worker."""

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        """Run rollouts until the event is set."""
        ...


class ExecutionStrategy(ABC):
    """Runs the two bundles over a store."""

    @abstractmethod
    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run both, and return when both have ended.

        Args:
            algorithm: Run once.
            runner: Run once for each worker, with its number from 0.
            store: What they share.

        Raises:
            Exception: What the algorithm raised.
            ExecutionError: The runners failed.
            KeyboardInterrupt: Ctrl-C; both have been ended.
        """
