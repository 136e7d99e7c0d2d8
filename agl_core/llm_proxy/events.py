"""Server-sent events, found in bytes however these are split. Each keeps its bytes, so that what
needs no change passes as it came. Lines end in LF, CR LF or a bare CR.
"""

import re
from dataclasses import dataclass

DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\n\n|\n\r\n|\r\r|\n\r(?=[^\n])")
"""A line end and an empty line. A CR after an LF may belong to an LF that is still to come; after a
bare CR it does not, and waiting for the next byte would hold up the event."""
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event."""

    raw: bytes
    """All its bytes, the blank line at its end included."""

    def data(self) -> bytes:
        """Return what its `data:` lines hold; empty for a comment."""
        lines = _LINE_END.split(self.raw)
        return b"\n".join(
            line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")
        )

    def with_data(self, data: bytes) -> bytes:
        """Return its bytes with other data, on one line."""
        lines = _LINE_END.split(self.raw)
        other = [line for line in lines if line and not line.startswith(b"data:")]
        return b"\n".join([*other, b"data: " + data]) + b"\n\n"


class EventSplitter:
    """Splits bytes into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, content: bytes) -> list[StreamEvent]:
        """Return the events that end in these bytes."""
        start = max(0, len(self._buffer) - 2)
        self._buffer += content
        events: list[StreamEvent] = []
        begin = 0
        while found := _EVENT_END.search(self._buffer, max(begin, start)):
            events.append(StreamEvent(bytes(self._buffer[begin : found.end()])))
            begin = found.end()
        del self._buffer[:begin]
        return events

    def rest(self) -> bytes:
        """Return what came after the last event."""
        return bytes(self._buffer)


def to_event(data: bytes, name: str | None = None) -> bytes:
    """Return the bytes of an event, named where its kind is to be told."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"
