"""Requests to the store's server: sent again until there is an answer, with one key for all tries.

An answer is what the server says about the request. Silence, 408 and 5xx are none; another try
follows after a delay, and after the server has passed a health check.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from pydantic import SecretStr

from agl_core.errors import StoreError, TransientError
from agl_core.store import wire
from agl_core.utils.loop_connections import LoopConnections
from agl_core.utils.shown_url import without_credentials

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallSettings:
    """How a client asks; holds values only."""

    retry_delays: Sequence[float] = (1.0, 2.0, 5.0)
    """Seconds before each further try."""
    health_retry_delays: Sequence[float] = (0.1, 0.2, 0.5)
    """Seconds between looks at the server's health before a further try; empty for no look."""
    request_timeout: float = 30.0
    connection_timeout: float = 5.0
    token: SecretStr | None = None
    run_id: str | None = None


class UnknownRouteError(StoreError):
    """The server does not know the request at all; it may be an older one."""


class Calls:
    """Sends requests to one server; for any thread and event loop.

    Args:
        server_address: `http://host:port`.
        settings: How.
    """

    def __init__(self, server_address: str, settings: CallSettings) -> None:
        self._url = server_address + wire.PREFIX
        self._settings = settings
        self._connections = LoopConnections(server_address)
        self._headers: dict[str, str] = {}
        if settings.token is not None:
            self._headers["authorization"] = f"Bearer {settings.token.get_secret_value()}"
        if settings.run_id is not None:
            self._headers[wire.RUN_HEADER] = wire.header_text(settings.run_id)

    async def send(
        self,
        operation: wire.Operation,
        path: str,
        content: str | None = None,
        *,
        key: str | None = None,
        hold_seconds: float = 0.0,
    ) -> httpx.Response:
        """Send a request until there is an answer, and return it.

        Args:
            operation: What is asked.
            path: Its path with the arguments in it.
            content: JSON.
            key: Under which the call is known; None for a new one.
            hold_seconds: How long the server may take its time.

        Raises:
            StoreError: The store refuses the request.
            RuntimeError: It evicted the spans that are asked for.
            NotImplementedError: It does not do that.
            TransientError: There is no answer.
        """
        headers = dict(self._headers)
        if content is not None:
            headers["content-type"] = "application/json"
        if operation.repeats is not None:
            headers[wire.KEY_HEADER] = wire.header_text(key or uuid.uuid4().hex)
        failure = ""
        for delay in (None, *self._settings.retry_delays):
            if delay is not None:
                logger.warning("store: %s: %s; trying again", operation.name, failure)
                await asyncio.sleep(delay)
                if not await self._is_healthy():
                    continue
            try:
                response = await self._send_once(
                    operation.method, path, headers, content, hold_seconds
                )
            except httpx.InvalidURL as error:
                raise StoreError(f"{operation.name} cannot be asked: {error}") from error
            except httpx.RequestError as error:
                failure = f"{type(error).__name__} {error}".rstrip()
                continue
            if response.is_success:
                return response
            if response.status_code != 408 and response.status_code not in _NO_ANSWERS:
                raise _refused(response)
            failure = f"HTTP {response.status_code}: {_detail(response)}"
        raise TransientError(
            f"{operation.name}: no answer from the store {without_credentials(self._url)}: "
            f"{failure}"
        )

    async def close(self) -> None:
        """Close the connections that no request uses."""
        await self._connections.close()

    async def _send_once(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        content: str | None = None,
        hold_seconds: float = 0.0,
    ) -> httpx.Response:
        settings = self._settings
        timeout = httpx.Timeout(
            settings.request_timeout + hold_seconds, connect=settings.connection_timeout
        )
        request = httpx.Request(
            method,
            self._url + path,
            headers=headers,
            content=content,
            extensions={"timeout": timeout.as_dict()},
        )
        return await self._connections.send(request)

    async def _is_healthy(self) -> bool:
        """Look at the server's health until it is well, or no look is left."""
        delays = self._settings.health_retry_delays
        if not delays:
            return True
        for delay in (0.0, *delays):
            await asyncio.sleep(delay)
            try:
                if (await self._send_once("GET", "/health")).is_success:
                    return True
            except httpx.RequestError:
                pass  # not yet
        return False


_NO_ANSWERS = {500, *range(502, 600)}


def _refused(response: httpx.Response) -> Exception:
    """Return a refusal as the error that it is in the store's own process."""
    detail = _detail(response)
    if response.status_code == 405 or (
        response.status_code == 404 and detail in ("Not Found", "HTTP 404 Not Found")
    ):
        return UnknownRouteError(detail)
    if response.status_code == 410:
        return RuntimeError(detail)
    if response.status_code == 501:
        return NotImplementedError(detail)
    return StoreError(detail)


def _detail(response: httpx.Response) -> str:
    """Return what a server says about an error."""
    try:
        return str(json.loads(response.content)["detail"])
    except (ValueError, TypeError, KeyError):
        return f"HTTP {response.status_code} {response.text[:200]}".rstrip()
