"""The body of a request to the store's server, within its limits."""

import gzip
import io
import zlib

from starlette.requests import Request

from agl_core.store.refusals import Refusal


async def read_body(
    request: Request, limit: int, media_type: str, *, parameters: bool = True
) -> bytes:
    """Return the body of a request, decompressed where it is gzip.

    Args:
        request: Not read yet.
        limit: Most bytes, before and after decompression.
        media_type: What a body must be; a browser's form or text could come from anywhere.
        parameters: Whether the type may be followed by parameters, such as a charset.

    Raises:
        Refusal: It is larger, of another type, or no gzip although it says so.
    """
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            raise Refusal(413, f"the request is larger than {limit} bytes")
    if not content:
        return b""
    sent = request.headers.get("content-type", "")
    if (sent.partition(";")[0].strip().lower() if parameters else sent) != media_type:
        raise Refusal(415, f"the request is {sent or 'of no type'}; it must be {media_type}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return bytes(content)
    if encoding != "gzip":
        raise Refusal(415, f"content encoding {encoding} is not known; use gzip or none")
    return _decompress(bytes(content), limit)


def _decompress(content: bytes, limit: int) -> bytes:
    """Return the content of all members of a gzip stream, together not longer than the limit."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            text = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Refusal(400, f"the request is not gzip: {error}") from error
    if len(text) > limit:
        raise Refusal(413, f"the request is larger than {limit} bytes when decompressed")
    return text
