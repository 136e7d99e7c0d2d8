"""Answers of a server under the keys of calls, so that a repeated call finds the first one's."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from starlette.responses import Response


class Repeated:
    """Gives a call with a known key the answer of the first; of one event loop.

    A repetition that comes while the first still works waits for it. Failures are not kept: a
    repetition works anew.

    Args:
        max_answers: Beyond which the oldest are forgotten.
        max_bytes: The same, for the sum of their bodies.
    """

    def __init__(self, max_answers: int = 10_000, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[str, Response] = OrderedDict()
        self._working: dict[str, asyncio.Task[Response]] = {}

    async def once(self, key: str, work: Callable[[], Awaitable[Response]]) -> Response:
        """Return the answer to a key: that of the first call, or of `work`."""
        answer = self._answers.get(key)
        if answer is not None:
            return answer
        task = self._working.get(key)
        if task is None:
            task = self._working[key] = asyncio.create_task(self._work(key, work))
        # A client that goes away stops neither the work nor the others who wait for it.
        return await asyncio.shield(task)

    async def _work(self, key: str, work: Callable[[], Awaitable[Response]]) -> Response:
        try:
            answer = await work()
        finally:
            del self._working[key]
        if answer.status_code < 400:
            self._keep(key, answer)
        return answer

    def _keep(self, key: str, answer: Response) -> None:
        self._answers[key] = answer
        self._num_bytes += len(answer.body)
        while len(self._answers) > self._max_answers or self._num_bytes > self._max_bytes:
            _, forgotten = self._answers.popitem(last=False)
            self._num_bytes -= len(forgotten.body)
