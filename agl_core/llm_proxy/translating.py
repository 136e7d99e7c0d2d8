"""What the writers of translated streams share: when a stream begins, ends and breaks off."""

from abc import ABC, abstractmethod
from typing import Any

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.events import StreamEvent
from agl_core.llm_proxy.pieces import FinishPiece, Piece, to_pieces
from agl_core.llm_proxy.refusal import Refusal


class TranslatingWriter(ABC):
    """Writes events of another dialect from the chunks of a chat completion (a `StreamWriter`)."""

    def __init__(self) -> None:
        self._has_begun = False
        self._has_finished = False
        """Whether the model server said why its answer ended."""
        self._has_ended = False
        self._usage: JsonObject | None = None
        """As the model server counts; it comes last."""

    def chunk(self, event: StreamEvent, chunk: Any) -> bytes:
        """Return the events that a chunk makes."""
        del event
        if self._has_ended:
            return b""
        if error := chunk.get("error"):
            return self.failure(Refusal(502, f"the model server broke off: {error}", ""))
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        pieces = list(to_pieces(chunk))
        begin = b"" if self._has_begun else self._begin(chunk)
        self._has_begun = True
        self._has_finished |= any(isinstance(piece, FinishPiece) for piece in pieces)
        return begin + b"".join(map(self._write, pieces))

    def other(self, event: StreamEvent) -> bytes:
        """Return nothing: comments are the model server's own."""
        del event
        return b""

    def done(self, event: StreamEvent) -> bytes:
        """Return the stream's end."""
        del event
        return self.end(b"")

    def end(self, rest: bytes) -> bytes:
        """Return the stream's end, if it is not written; an error where the answer has none."""
        del rest
        if self._has_ended:
            return b""
        if not self._has_finished:
            message = "the stream ended without a finish reason"
            return self.failure(Refusal(502, message, "stream_broken"))
        self._has_ended = True
        return self._last()

    def failure(self, refusal: Refusal) -> bytes:
        """Return an error event, if the stream has no end yet."""
        if self._has_ended:
            return b""
        self._has_ended = True
        return self._error(refusal)

    @abstractmethod
    def _begin(self, chunk: JsonObject) -> bytes:
        """Return what comes before the first piece."""

    @abstractmethod
    def _write(self, piece: Piece) -> bytes:
        """Return the events that a piece makes."""

    @abstractmethod
    def _last(self) -> bytes:
        """Return what comes after the last piece."""

    @abstractmethod
    def _error(self, refusal: Refusal) -> bytes:
        """Return an error event."""
