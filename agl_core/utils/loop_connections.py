"""HTTP connections for any thread and event loop: those of a loop are closed when it ends."""

import asyncio
import threading
from collections.abc import AsyncGenerator

import httpx

from agl_core.utils.connections import Connections


class LoopConnections:
    """Open connections to one server, kept apart by the event loop that uses them.

    Args:
        base_url: Of the server; only its scheme matters here.
    """

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._lock = threading.Lock()
        self._by_loop: dict[
            asyncio.AbstractEventLoop, tuple[Connections, AsyncGenerator[None]]
        ] = {}

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the answer, read to its end.

        Raises:
            httpx.RequestError: No connection, it broke, or the answer cannot be decoded.
        """
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        return await (found[0] if found else await self._open(loop)).send(request)

    async def close(self) -> None:
        """Close all that no request uses."""
        here = asyncio.get_running_loop()
        with self._lock:
            opened, self._by_loop = self._by_loop, {}
        for loop, (connections, ending) in opened.items():
            if loop is here:
                await ending.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(connections.close(), loop)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connections:
        connections = Connections(self._base_url)
        # asyncio.run closes the asynchronous generators of its loop before the loop: the one hook
        # there is. It must be kept here, else it ends at once.
        ending = self._close_at_end(loop, connections)
        await anext(ending)
        with self._lock:
            for other in [other for other in self._by_loop if other.is_closed()]:
                del self._by_loop[other]
            return self._by_loop.setdefault(loop, (connections, ending))[0]

    async def _close_at_end(
        self, loop: asyncio.AbstractEventLoop, connections: Connections
    ) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._by_loop.pop(loop, None)
            await connections.close()
