"""Writes the events of an Anthropic message from the chunks of a chat completion.

message_start, then for each text or tool call content_block_start, deltas, content_block_stop,
then message_delta (stop reason and usage, which comes last upstream) and message_stop
"""

from collections.abc import Callable
from typing import Any

import orjson

from agl_core.llm_proxy.answer_shape import count_of
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.events import to_event
from agl_core.llm_proxy.pieces import CallPiece, FinishPiece, Piece, TextPiece
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.translating import TranslatingWriter

StopReason = Callable[..., tuple[str | None, str | None]]


class MessagesWriter(TranslatingWriter):
    """Writes one message.

    Args:
        model: The name that the agent asked for.
        to_error: Returns a refusal in Anthropic's shape.
        stop_reason: Returns stop reason and stop sequence of a choice.
    """

    def __init__(
        self, model: Any, to_error: Callable[[Refusal], JsonObject], stop_reason: StopReason
    ) -> None:
        super().__init__()
        self._model = model
        self._to_error = to_error
        self._stop_reason = stop_reason
        self._num_blocks = 0
        self._open_block: int | str | None = None
        """Index upstream of the tool call that is written, or "text"."""
        self._calls: set[int] = set()
        self._finish = FinishPiece("", None)

    def _error(self, refusal: Refusal) -> bytes:
        return _event(self._to_error(refusal))

    def _begin(self, chunk: JsonObject) -> bytes:
        message = {
            "id": f"msg_{chunk.get('id')}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts(),
        }
        return _event({"type": "message_start", "message": message})

    def _write(self, piece: Piece) -> bytes:
        if isinstance(piece, FinishPiece):
            self._finish = piece
            return b""
        if isinstance(piece, TextPiece):
            opened = self._open("text", {"type": "text", "text": ""})
            return opened + self._delta({"type": "text_delta", "text": piece.text})
        return self._write_call(piece)

    def _write_call(self, piece: CallPiece) -> bytes:
        if piece.index in self._calls and piece.index != self._open_block:
            raise TypeError("a tool call goes on after the next one began")
        self._calls.add(piece.index)
        block = {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}
        opened = self._open(piece.index, block)
        if not piece.arguments:
            return opened
        delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        return opened + self._delta(delta)

    def _open(self, key: int | str, block: JsonObject) -> bytes:
        """Begin a block, unless it is the one that is open."""
        if key == self._open_block:
            return b""
        closed = self._close()
        self._open_block = key
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return closed + _event(start)

    def _delta(self, delta: JsonObject) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _close(self) -> bytes:
        if self._open_block is None:
            return b""
        self._open_block = None
        self._num_blocks += 1
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _last(self) -> bytes:
        reason, sequence = self._stop_reason(
            self._finish.reason, self._finish.stop_sequence, has_calls=bool(self._calls)
        )
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._counts()}
        return self._close() + _event(last) + _event({"type": "message_stop"})

    def _counts(self) -> JsonObject:
        return token_counts(self._usage)


def token_counts(usage: Any) -> JsonObject:
    """Return a chat completion's usage as Anthropic has it; 0 where the server counts nothing."""
    return {
        "input_tokens": count_of(usage, "prompt_tokens") or 0,
        "output_tokens": count_of(usage, "completion_tokens") or 0,
    }


def _event(data: JsonObject) -> bytes:
    return to_event(orjson.dumps(data), data["type"])
