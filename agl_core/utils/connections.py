"""HTTP connections to one server, each used by one request at a time."""

import ssl
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """An answer whose body is still to be read, and the connection that it comes on."""

    response: httpx.Response
    _connection: httpx.AsyncHTTPTransport
    _idle: list[httpx.AsyncHTTPTransport]

    async def close(self) -> None:
        """Give the connection back, or close it where the body was not read to its end."""
        if self.response.is_closed:
            self._idle.append(self._connection)
            return
        await self._connection.aclose()


class Connections:
    """Open connections to one server; of one event loop.

    Not one `httpx.AsyncClient`: its pool gives one idle connection to many requests at once and
    lets them try again (11 tries for each of 16 concurrent calls, measured with httpcore 1.0,
    November 2026). Proxies in the environment (HTTP_PROXY) are not for our servers, and a bare
    transport knows none.

    Args:
        base_url: Of the server; only its scheme matters here.
    """

    def __init__(self, base_url: str) -> None:
        self._ssl = ssl.create_default_context() if base_url.startswith("https:") else False
        self._idle: list[httpx.AsyncHTTPTransport] = []
        """Open connections that no request uses, the last used one last."""

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the answer, read to its end.

        Raises:
            httpx.RequestError: No connection, it broke, or the answer cannot be decoded.
        """
        opened = await self.open(request)
        try:
            await opened.response.aread()
        finally:
            await opened.close()
        return opened.response

    async def open(self, request: httpx.Request) -> "OpenResponse":
        """Send a request and return the answer's beginning; the caller reads and closes it.

        Raises:
            httpx.TransportError: No connection, or it broke.
        """
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        return OpenResponse(response, connection, self._idle)

    async def close(self) -> None:
        """Close those that no request uses."""
        while self._idle:
            await self._idle.pop().aclose()

    def _connect(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=60.0)
        return httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=limits)
