"""The store's server: a store of this process, for other processes and machines too."""

import asyncio
import functools
import inspect
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self

from pydantic import SecretStr

from agl_core.env_var import STORE_TOKEN, store_token
from agl_core.errors import ConfigError
from agl_core.store import wire
from agl_core.store.base import LightningStore, LightningStoreCapabilities
from agl_core.store.client import LightningStoreClient
from agl_core.store.routes import MAX_REQUEST_BYTES, AppConfig, StoreApp
from agl_core.store.threading import LightningStoreThreaded
from agl_core.utils.foreign_requests import is_loopback
from agl_core.utils.threaded_server import ThreadedServer

_ANY_ADDRESS = ("0.0.0.0", "::")
_MAX_PORT = 65535


class LightningStoreServer(LightningStore):
    """Serves a store over HTTP, from a thread of this process.

    Calls of this process go straight to the store. Pickled, or in a forked process, the server is
    a `LightningStoreClient` of itself.

    Args:
        store: What is served; closed with this one.
        host: Address to listen on; None for loopback. Any other needs a token.
        port: None for 4747, 0 for a free one.
        cors_allow_origins: Origins of web pages that may call it, or "*"; none by default.
        launch_mode: Only "thread".
        launcher_args: Only None.
        n_workers: Only 1.
        tracker: Only None.
        token: What clients must send; None for `AGL_STORE_TOKEN`, if it is set.
        run_id: Its name to clients, which may insist on one; None for the store's own.
        max_request_bytes: Larger requests are refused.

    Raises:
        ValueError: The store may not be used by several tasks at once, others could connect and
            there is no token, or an argument has a value that is not served here.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str | None = None,
        port: int | None = None,
        cors_allow_origins: Sequence[str] | str | None = None,
        launch_mode: str = "thread",
        launcher_args: Any = None,
        n_workers: int = 1,
        tracker: Any = None,
        *,
        token: SecretStr | str | None = None,
        run_id: str | None = None,
        max_request_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        _check_launch(launch_mode, launcher_args, n_workers, tracker)
        if not store.capabilities.get("async_safe", False):
            raise ValueError(
                "The store is not async-safe. Please use another store for the "
                f"server: {type(store).__name__} may not be used by several tasks at once"
            )
        self.store = store
        self._direct = LightningStoreThreaded(store)
        self._host = host or "127.0.0.1"
        self._port = wire.DEFAULT_PORT if port is None else port
        if not 0 <= self._port <= _MAX_PORT:
            raise ConfigError(f"the port is {self._port}; it must be 0 to {_MAX_PORT}")
        self._token = store_token(token)
        if not is_loopback(self._host) and self._token is None:
            raise ConfigError(
                f"a store on {self._host} needs a token ({STORE_TOKEN}): others can connect there"
            )
        origins = (
            [cors_allow_origins] if isinstance(cors_allow_origins, str) else cors_allow_origins
        )
        self._origins = tuple(origins or ())
        self._max_request_bytes = max_request_bytes
        self.run_id = run_id
        """Its name to clients; the store's own is known once it has been started."""
        self._pid = os.getpid()
        self._app: StoreApp | None = None
        self._server: ThreadedServer | None = None
        self._client: LightningStoreClient | None = None
        self._starting = threading.Lock()
        """Held by threads that start or stop the server; calls may come from any event loop."""

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """All."""
        return LightningStoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=True
        )

    @property
    def endpoint(self) -> str:
        """`http://host:port`, as other processes reach it."""
        return self._address(_reachable_host(self._host))

    def otlp_traces_endpoint(self) -> str:
        """Return where OTLP/HTTP traces are received."""
        return self.endpoint + wire.TRACES_PATH

    async def start(self) -> Self:
        """Listen, and return once requests are served; a server that runs is left as it is.

        Several calls at once start one server.

        Raises:
            ConfigError: The address cannot be used.
            TransientError: The server is not ready within 10 s.
        """
        if self._server is not None:
            return self
        if self.run_id is None:
            self.run_id = (await self._direct.statistics()).get("run_id")
        await asyncio.to_thread(self._start)
        return self

    async def stop(self) -> None:
        """Stop serving; the store stays open."""
        await asyncio.to_thread(self._stop)

    async def run_forever(self) -> None:
        """Serve until cancelled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def close(self) -> None:
        """Stop serving and close the store."""
        await self.stop()
        await self._direct.close()

    def client(self) -> LightningStoreClient:
        """Return a client of this server for processes of this machine.

        Raises:
            RuntimeError: It is not running.
        """
        host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
        address = self._address("::1" if host == "::" else host)
        return LightningStoreClient(address, token=self._token, run_id=self.run_id)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def __reduce__(self) -> tuple[Any, ...]:
        return self.client().__reduce__()

    def _start(self) -> None:
        with self._starting:
            if self._server is None:
                self._listen()

    def _listen(self) -> None:
        config = AppConfig(
            token=self._token,
            run_id=self.run_id,
            cors_allow_origins=self._origins,
            max_request_bytes=self._max_request_bytes,
        )
        app = StoreApp(self._direct, config)
        server = ThreadedServer(app.asgi(), self._host, self._port)
        try:
            server.start()
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: "
                f"{getattr(error, 'strerror', None) or error}; "
                "is another store there? Choose another port (0 for a free one)"
            ) from error
        self._app, self._server = app, server

    def _stop(self) -> None:
        with self._starting:
            if self._server is None or self._app is None:
                return
            self._app.end_waits()
            self._server.stop()
            self._app = self._server = None

    def _address(self, host: str) -> str:
        if self._server is None:
            raise RuntimeError("the store's server is not running; await start() first")
        port = self._server.url.rpartition(":")[2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _reached(self) -> LightningStore:
        """Return the store in this process, and a client of it in a forked one."""
        if self._pid == os.getpid():
            return self._direct
        if self._client is None:
            self._client = self.client()
        return self._client


def _check_launch(launch_mode: str, launcher_args: Any, n_workers: int, tracker: Any) -> None:
    if launch_mode != "thread":
        raise ConfigError(
            f"launch_mode {launch_mode!r} is not served: the server is a thread of this process; "
            "for one of its own run `agl store`"
        )
    if n_workers != 1:
        raise ConfigError(f"n_workers is {n_workers}; the store is served by one worker")
    if launcher_args is not None or tracker is not None:
        raise ConfigError("launcher_args and tracker are not supported; leave them out")


def _reachable_host(host: str) -> str:
    """Return the address of this machine that others use, where it listens on all of them."""
    if host not in _ANY_ADDRESS:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; the system picks a route
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _pass_on(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(getattr(LightningStore, name))
    async def method(self: LightningStoreServer, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._reached(), name)(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return method


for _name, _method in inspect.getmembers(LightningStore, inspect.iscoroutinefunction):
    if _name not in vars(LightningStoreServer):
        setattr(LightningStoreServer, _name, _pass_on(_name))
