"""What translating writers see of a stream of chunks: the first choice, piece by piece."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from agl_core.llm_proxy.answer_shape import check_message


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a tool call; its first piece has id and name."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class FinishPiece:
    """Why the choice ended."""

    reason: str
    stop_sequence: str | None
    """The text of `stop` that ended it, where the server names it."""


Piece = TextPiece | CallPiece | FinishPiece


def to_pieces(chunk: dict[str, Any]) -> Generator[Piece]:
    """Return the pieces of the first choice in a chunk.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: It is no chunk of a chat completion.
    """
    for choice in chunk["choices"]:
        if choice.get("index", 0) != 0:
            continue
        delta = choice.get("delta") or {}
        if fault := check_message(delta):
            raise ValueError(fault)
        if text := delta.get("content"):
            yield TextPiece(text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if type(call["index"]) is not int:
                raise ValueError(f"{call['index']!r} is not the index of a tool call")
            yield CallPiece(
                call["index"],
                call.get("id"),
                function.get("name"),
                function.get("arguments") or "",
            )
        if reason := choice.get("finish_reason"):
            if not isinstance(reason, str):
                raise ValueError(f"finish_reason is {reason!r}, not a text")
            stop = choice.get("stop_reason")
            yield FinishPiece(reason, stop if isinstance(stop, str) else None)
