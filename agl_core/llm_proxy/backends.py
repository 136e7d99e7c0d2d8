"""Which model server gets a call: the least loaded healthy one, with a preference by prefix.

Calls that begin alike (the samples of one prompt, the turns of one conversation) prefer the same
server, whose prefix cache then has their beginning (rendezvous hashing), as long as it is not much
busier than the least loaded one. A server that cannot be reached is down until its `/health`
answers; where all are down, they are tried all the same. Addresses may be replaced at any time.
"""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import aiohttp
import orjson
from yarl import URL

from agl_core.errors import ConfigError, UpstreamError
from agl_core.llm_proxy.capture import JsonObject

logger = logging.getLogger(__name__)

TOKENIZE_PATH = "/tokenize"
"""Where vLLM counts tokens; not a route of OpenAI's, so not below `/v1`."""
_SLACK = 4
"""Calls that a preferred server may have above 5/4 of what the least loaded one has."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
"""Calls have a deadline of their own; a connection that does not come about is given up."""
_KEEP_ALIVE_SECONDS = 4.0
"""Of an idle connection. Below the 5 s after which uvicorn, so vLLM, closes it: a request that
meets the close would fail."""
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class UnknownModel(UpstreamError):  # noqa: N818 - the agent's mistake, told as an answer
    """No model server has the model that was asked for."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One model server, or one model of it."""

    url: str
    """Base URL, ending in `/v1`."""
    api_key: str | None = None
    model: str | None = None
    """The name that agents ask for; None for every name."""
    upstream_model: str | None = None
    """What the server calls it, where that is another name."""
    returns_token_ids: bool = True
    """Whether it may be asked for `return_token_ids`, as vLLM and our engine may; other servers may
    refuse requests with unknown fields."""

    def __post_init__(self) -> None:
        try:
            url = URL(self.url)
        except ValueError as error:
            raise ConfigError(f"a model server's URL cannot be read: {error}") from error
        if url.user or url.password:  # not shown: it would be in logs from here on
            raise ConfigError(
                f"the URL of model server {url.host} has a user or password in it; give api_key"
            )
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"model server {self.url!r} is no http:// or https:// URL")


class LiveBackend:
    """A model server while calls go to it; of one event loop.

    aiohttp and not httpx, which needs three times the CPU time for a call (measured with httpx
    0.28 and aiohttp 3.14, November 2026).
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.base_url = backend.url.rstrip("/")
        self._root = self.base_url.removesuffix("/v1")
        self.num_in_flight = 0
        self.is_up = True
        self._headers = {"content-type": "application/json"}
        if backend.api_key is not None:
            self._headers["authorization"] = f"Bearer {backend.api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, content: bytes) -> aiohttp.ClientResponse:
        """Send a JSON request and return the answer's beginning; the caller reads and closes it.

        Args:
            path: Below the base URL; `TOKENIZE_PATH` is beside its `/v1`.
            content: The request.

        Raises:
            aiohttp.ClientError: No connection, or it broke.
            TimeoutError: The connection did not come about.
        """
        base = self._root if path == TOKENIZE_PATH else self.base_url
        return await self._connected().post(f"{base}{path}", data=content)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Proxies in the environment are not for our servers: trust_env stays off.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
                headers=self._headers,
                timeout=_TIMEOUT,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def mark(self, *, is_up: bool) -> None:
        """Note whether it can be reached; a change is logged."""
        if is_up is not self.is_up:
            logger.warning("model server %s is %s", self.base_url, "up" if is_up else "down")
        self.is_up = is_up

    def release(self) -> None:
        """Count one call less."""
        self.num_in_flight -= 1

    async def probe(self) -> None:
        """Ask for its health."""
        url = f"{self._root}/health"
        try:
            async with self._connected().get(url, timeout=_PROBE_TIMEOUT) as response:
                self.mark(is_up=response.status < 500)
        except (aiohttp.ClientError, TimeoutError):
            self.mark(is_up=False)


class Backends:
    """The model servers that calls may go to.

    Args:
        backends: At least one.

    Raises:
        ConfigError: There is none.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._live: tuple[LiveBackend, ...] = ()
        self._retired: list[LiveBackend] = []
        self.replace(backends)

    def replace(self, backends: Sequence[Backend]) -> None:
        """Send calls to these from now on, also further tries of calls under way; from any thread.

        Raises:
            ConfigError: There is none.
        """
        if not backends:
            raise ConfigError("no model server is named; give at least one base URL")
        known = {live.backend: live for live in self._live}
        kept = tuple(known.pop(backend, None) or LiveBackend(backend) for backend in backends)
        self._retired += known.values()
        self._live = kept

    def readdress(self, urls: Sequence[str]) -> None:
        """Send calls to these addresses from now on; keys and names stay as they are.

        Raises:
            ConfigError: There is none, or it is not clear what a new one serves.
        """
        known = [live.backend for live in self._live]
        settings = {replace(backend, url=known[0].url) for backend in known}
        wanted: list[Backend] = []
        for url in urls:
            same = [backend for backend in known if backend.url == url]
            if not same and len(settings) > 1:
                raise ConfigError(
                    f"model server {url!r} is new, and those known have different models or keys: "
                    "start the proxy again with it"
                )
            wanted += same or [replace(known[0], url=url)]
        self.replace(wanted)

    def status(self) -> list[JsonObject]:
        """Return URL, state and load of each."""
        return [
            {"url": live.base_url, "is_up": live.is_up, "in_flight": live.num_in_flight}
            for live in self._live
        ]

    def choose(self, asked: JsonObject, avoid: Collection[LiveBackend] = ()) -> LiveBackend:
        """Return the server for a request; one of `avoid` only where there is no other.

        Raises:
            UnknownModel: None has the model.
        """
        able = self._find_able(asked.get("model"))
        if len(able) == 1:
            return able[0]
        able = [live for live in able if live not in avoid] or able
        able = [live for live in able if live.is_up] or able
        least = min(live.num_in_flight for live in able)
        key = _prefix_key(asked)
        preferred = max(able, key=lambda live: _weight(key, live.base_url))
        if preferred.num_in_flight <= least * 5 // 4 + _SLACK:
            return preferred
        return next(live for live in able if live.num_in_flight == least)

    def has_other(self, asked: JsonObject, avoid: Collection[LiveBackend]) -> bool:
        """Say whether a server that is up is not among those to avoid."""
        able = self._find_able(asked.get("model"))
        return any(live.is_up and live not in avoid for live in able)

    async def watch(self, seconds: float) -> None:
        """Probe the servers every so many seconds, where there are several, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if len(live := self._live) > 1:
                await asyncio.gather(*(backend.probe() for backend in live))

    async def close_retired(self) -> None:
        """Close the connections of servers that were replaced, once no call uses them."""
        idle = [live for live in self._retired if not live.num_in_flight]
        self._retired = [live for live in self._retired if live.num_in_flight]
        for live in idle:
            await live.close()

    async def close(self) -> None:
        """Close all connections that no call uses."""
        for live in (*self._live, *self._retired):
            await live.close()

    def _find_able(self, model: object) -> list[LiveBackend]:
        able = [live for live in self._live if live.backend.model in (None, model)]
        if not able:
            names = ", ".join(sorted({str(live.backend.model) for live in self._live}))
            raise UnknownModel(f"no model server has {model!r}; there are: {names}")
        return able


def _prefix_key(asked: JsonObject) -> bytes:
    """Return what stands for the beginning of a request's prompt."""
    messages = asked.get("messages")
    start = messages[:2] if isinstance(messages, list) else asked.get("prompt", "")[:256]
    return orjson.dumps(start)


def _weight(key: bytes, url: str) -> bytes:
    return hashlib.blake2b(key, digest_size=8, salt=_salt(url)).digest()


def _salt(url: str) -> bytes:
    return hashlib.blake2b(url.encode(), digest_size=16).digest()
