"""The supervisor of runner processes as the trainer's process sees it."""

import asyncio
import os
from contextlib import suppress
from multiprocessing import get_context

from agl_core.execution.child import Child, end
from agl_core.execution.events import MultiprocessingEvent
from agl_core.execution.queue_watch import QueueWatch
from agl_core.execution.runner_processes import RunnerSettings, Work, supervise
from agl_core.store.base import LightningStore


class Supervisor:
    """A process that supervises runners, started when this is made.

    Args:
        settings: What becomes of the runners.
        work: The runner's bundle.
        event: Says that the work is over.
    """

    def __init__(self, settings: RunnerSettings, work: Work, event: MultiprocessingEvent) -> None:
        self._settings = settings
        self._event = event
        context = get_context(settings.start_method)
        told, self._tell = context.Pipe(duplex=False)
        packed = work.packed(settings.start_method)
        self._child = Child(
            context,
            supervise,
            (settings, packed, event, told, os.getpid()),
            "the runners' supervisor",
            dies_with_parent=False,
        )
        told.close()
        self._queue = QueueWatch()

    def begin(self, store: LightningStore | None) -> None:
        """Let the runners start.

        Args:
            store: For them; None for the one that is part of their work.
        """
        with suppress(BrokenPipeError):  # it has ended; `check` says why
            self._tell.send(store)

    async def check(self, store: LightningStore) -> None:
        """See that there are runners for what is queued.

        Raises:
            ExecutionError: They failed, or all have ended and rollouts wait for one.
        """
        code = self._child.exit_code
        if code is None:
            return
        self._raise_for(code)
        if not self._event.is_set():  # else they were told to end, and more is not expected of them
            await self._queue.check(store)

    async def ended(self) -> None:
        """Wait until all runners have ended, and see to it, once the event is set."""
        await asyncio.to_thread(self.kill, self._settings.end_seconds)

    def verify(self) -> None:
        """See that the runners ended as they should.

        Raises:
            ExecutionError: They did not.
        """
        self._raise_for(self._child.exit_code)

    def kill(self, graceful_seconds: float = 0.0) -> None:
        """End the supervisor where it still runs; its runners kill themselves then.

        Args:
            graceful_seconds: How long it may take to end them in order.
        """
        self._event.set()
        end([self._child], graceful_seconds, self._settings.terminate_seconds)
        self._tell.close()

    def _raise_for(self, code: int | None) -> None:
        if code != 0:
            raise self._child.error()
