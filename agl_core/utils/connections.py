"""HTTP connections to one server, each used by one request at a time."""

import ssl

import httpx


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
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            response = await connection.handle_async_request(request)
            await response.aread()
        except BaseException:
            await connection.aclose()
            raise
        self._idle.append(connection)
        return response

    async def close(self) -> None:
        """Close those that no request uses."""
        while self._idle:
            await self._idle.pop().aclose()

    def _connect(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=60.0)
        return httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=limits)
