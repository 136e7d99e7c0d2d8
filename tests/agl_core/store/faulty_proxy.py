"""A TCP proxy before a store's server that loses, delays and refuses what a test tells it to."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Self

Message = tuple[bytes, bytes]
"""Head and body."""
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


class FaultyProxy:
    """Passes requests on, each after the next fault of a plan; health checks pass as they are.

    Faults: "pass", "lose" (the server did it, the answer is lost), "503", or a number of seconds
    by which the answer is late.
    """

    def __init__(self, url: str) -> None:
        self._target = url.removeprefix("http://").split(":")
        self._server: asyncio.Server | None = None
        self.plan: deque[str | float] = deque()
        self.paths: list[str] = []
        """Of the requests that came, health checks left out."""
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()

    def expect(self, *faults: str | float) -> None:
        """Set the plan and forget the paths."""
        self.plan, self.paths = deque(faults), []

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target
        upstream, upwriter = await asyncio.open_connection(host, int(port))
        try:
            while (request := await _read(reader)) is not None:
                path = request[0].split(b" ")[1].decode()
                fault: str | float = "pass"
                if not path.endswith("/health"):
                    self.paths.append(path)
                    fault = self.plan.popleft() if self.plan else "pass"
                if fault == "503":
                    writer.write(_UNAVAILABLE)
                    continue
                upwriter.write(b"".join(request))
                answer = await _read(upstream)
                if fault == "lose" or answer is None:
                    return
                if isinstance(fault, float):
                    await asyncio.sleep(fault)
                writer.write(b"".join(answer))
        except ConnectionError:
            pass  # the client gave up
        finally:
            writer.close()
            upwriter.close()


async def _read(reader: asyncio.StreamReader) -> Message | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        return head, await reader.readexactly(_length(head.lower().split(b"\r\n")))
    except asyncio.IncompleteReadError:
        return None


def _length(lines: Sequence[bytes]) -> int:
    for line in lines:
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
