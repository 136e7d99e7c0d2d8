"""A server in a thread of this process, with its own event loop: the proxy, the store's server, and
fakes in tests.

Code that blocks its event loop therefore does not block the server.
"""

import asyncio
import logging
import socket
import threading
from typing import Any, Self

import uvicorn

from agl_core import env_var
from agl_core.errors import TransientError

logger = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """Says when it is ready."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class ThreadedServer:
    """An ASGI application on a port of this machine, in its own thread and event loop.

    Args:
        app: The application.
        host: Address to listen on; loopback unless other machines must reach it.
        port: 0 for a free one.
    """

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0) -> None:
        self._app = app
        self._address = (host, port)
        self._server: _Uvicorn | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """`http://host:port` of the running server."""
        if self._server is None:
            raise RuntimeError("the server is not running; call start() first")
        host = self._address[0]
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def start(self, deadline_seconds: float = 10.0) -> Self:
        """Listen, and return once requests are served.

        Raises:
            OSError: The address cannot be used.
            TransientError: The server is not ready before the deadline.
        """
        env_var.bypass_proxies(self._address[0])
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.create_server(self._address, family=family, backlog=1024)
        # Connections inherit it. asyncio leaves it off for such a socket, and an answer in two
        # writes then waits 40 ms for a delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_level="warning",
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
        server = self._server = _Uvicorn(config)
        self._thread = threading.Thread(
            target=server.run, args=([listener],), name=f"server-{self._port}", daemon=True
        )
        self._thread.start()
        if not server.ready.wait(deadline_seconds) or not server.started:
            self.stop()
            raise TransientError(f"the server was not ready within {deadline_seconds:g} s")
        return self

    def stop(self, deadline_seconds: float = 5.0) -> None:
        """Stop serving and wait for the thread's end; open requests are cut off after 2 s."""
        server, thread = self._server, self._thread
        if server is None or thread is None:
            return
        server.should_exit = True
        thread.join(deadline_seconds)
        if thread.is_alive():
            server.force_exit = True
            thread.join(1.0)
        if thread.is_alive():
            logger.warning("the server at %s did not stop; its thread is left behind", self.url)
        self._server = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.stop)
