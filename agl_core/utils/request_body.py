"""The body of a request to store, proxy or engine, within limits of size, time and content.

A small body can still be expensive: a gzip stream grows a thousandfold, and a JSON text of 60 MiB
can hold 20 million empty objects. So the number of bytes is limited before and after decompression,
and the number of JSON values before anything is parsed. Work on a large body runs in a thread, so
that the event loop goes on answering.
"""

import asyncio
import gzip
import io
import zlib
from collections.abc import Callable
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")

MAX_CONTAINERS: Final = 300_000
"""JSON objects and lists in one body; 10,000 spans have 100,000."""
MAX_VALUES: Final = 5_000_000
"""Commas in a JSON body, so about its values; 10,000 spans of 400 token ids have 4 million."""
MAX_KEYS: Final = 450_000
"""Colons in a JSON body, those in texts included; 10,000 spans have 300,000."""
REQUEST_SECONDS: Final = 60.0
"""How long a client may take to send a body."""
_SMALL_BYTES = 100_000
"""Bodies up to this size are parsed where they arrive: a thread costs more."""


class BodyRefused(Exception):  # noqa: N818 - an answer, raised to leave the handler
    """A body is beyond a limit, or is not what it says (400, 408, 413, 415 or 499)."""

    def __init__(self, status: int = 400, message: str = "") -> None:
        super().__init__(message)
        self.status = status


async def read_body(
    request: Request,
    limit: int,
    media_type: str,
    *,
    needs_type: bool = True,
    seconds: float = REQUEST_SECONDS,
) -> bytes:
    """Return the body of a request, decompressed if it is gzip.

    Args:
        request: Not read yet.
        limit: Most bytes, before and after decompression.
        media_type: What a body must be; a browser's form or text could come from any page.
        needs_type: Whether a body without a type is refused.
        seconds: How long the client may take to send it.

    Raises:
        BodyRefused: It is larger, slower, of another type, or no gzip although it says so.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise BodyRefused(413, f"the request is larger than {limit} bytes")
    except TimeoutError as error:
        message = f"the request did not arrive within {seconds:g} s"
        raise BodyRefused(408, message) from error
    except ClientDisconnect as error:
        message = "the client closed the connection before it had sent its request"
        raise BodyRefused(499, message) from error
    if not content:
        return b""
    sent = request.headers.get("content-type", "" if needs_type else media_type)
    # JSON may come with a charset; protobuf has none.
    kind = sent.partition(";")[0] if media_type == "application/json" else sent
    if kind.strip().lower() != media_type:
        raise BodyRefused(415, f"the request is {sent or 'of no type'}; it must be {media_type}")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return bytes(content)
    if encoding != "gzip":
        raise BodyRefused(415, f"content encoding {encoding} is not known; use gzip or none")
    return await asyncio.to_thread(_decompress, bytes(content), limit)


async def off_loop(body: bytes, work: Callable[[bytes], T]) -> T:
    """Return `work(body)`, done in a thread if the body is large."""
    if len(body) <= _SMALL_BYTES:
        return work(body)
    return await asyncio.to_thread(work, body)


def check_json(body: bytes) -> bytes:
    """Return a JSON body that is worth parsing.

    Raises:
        BodyRefused: It could hold more values than `MAX_CONTAINERS`, `MAX_VALUES` or `MAX_KEYS`.
    """
    if len(body) <= MAX_CONTAINERS:
        return body
    counts = (
        (body.count(b"{") + body.count(b"["), MAX_CONTAINERS, "objects and lists"),
        (body.count(b","), MAX_VALUES, "values"),
        (body.count(b":"), MAX_KEYS, "keys"),
    )
    for count, limit, what in counts:
        if count > limit:
            raise BodyRefused(413, f"the request has {count} {what}; the limit is {limit}")
    return body


def _decompress(content: bytes, limit: int) -> bytes:
    """Return the content of all members of a gzip stream, together not longer than the limit."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            text = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BodyRefused(400, f"the request is not gzip: {error}") from error
    if len(text) > limit:
        raise BodyRefused(413, f"the request is larger than {limit} bytes when decompressed")
    return text
