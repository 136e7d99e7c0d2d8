"""The responses to one call while the engine samples them, for an event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from agl_core.serving.engine import Engine
from agl_core.serving.generation import Completion, GenerationRequest, SampledToken


class GenerationStream:
    """Gives tokens as they are sampled; the engine works on until the end, or `cancel`.

    Made in the event loop that reads it.

    Args:
        engine: What samples.
        requests: [n] the choices of one call; the same weights answer all.
    """

    def __init__(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, SampledToken | BaseException]] = asyncio.Queue()
        self._first: tuple[int, SampledToken] | None = None
        sinks: list[Callable[[SampledToken], None]] = [
            partial(self._put, index) for index in range(len(requests))
        ]
        self._futures = engine.submit_together(requests, sinks)
        for index, future in enumerate(self._futures):
            future.add_done_callback(partial(self._finish, index))

    async def first(self) -> SampledToken:
        """Return the first token of any choice once it is there; iteration gives it too.

        Raises:
            AglError: What `Engine.submit` promises.
        """
        if self._first is None:
            self._first = await self._next()
        return self._first[1]

    async def __aiter__(self) -> AsyncGenerator[tuple[int, SampledToken]]:
        """Give each token with its choice's index, until all choices ended.

        Raises:
            AglError: What `Engine.submit` promises.
        """
        num_open = len(self._futures)
        while num_open:
            index, token = self._first or await self._next()
            self._first = None
            num_open -= token.finish_reason is not None
            yield index, token

    def cancel(self) -> None:
        """Stop the work that is not done."""
        for future in self._futures:
            future.cancel()

    async def _next(self) -> tuple[int, SampledToken]:
        index, found = await self._events.get()
        if isinstance(found, BaseException):
            raise found
        return index, found

    def _put(self, index: int, found: SampledToken | BaseException) -> None:
        """Hand something over to the event loop; from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, found))
        except RuntimeError:  # the loop is closed, so nobody waits any more
            self.cancel()

    def _finish(self, index: int, future: "Future[Completion]") -> None:
        """Hand over why a response failed; the end of a good one is in its last token."""
        try:
            error = future.exception(timeout=0)
        except CancelledError:
            return
        if error is not None:
            self._put(index, error)
