"""Writes the events of an OpenAI response from the chunks of a chat completion.

response.created, response.in_progress, then for each item output_item.added, its deltas, its
done events, output_item.done, then response.completed (or incomplete) with the whole response
"""

from typing import Any

import orjson

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.events import to_event
from agl_core.llm_proxy.pieces import CallPiece, FinishPiece, Piece, TextPiece
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.responses_items import call_item, finished, message_item, response_head
from agl_core.llm_proxy.translating import TranslatingWriter


class ResponsesWriter(TranslatingWriter):
    """Writes one response.

    Args:
        body: The agent's request.
    """

    def __init__(self, body: JsonObject) -> None:
        super().__init__()
        self._body = body
        self._sequence_number = 0
        self._answer_id: Any = None
        self._head: JsonObject | None = None
        self._output: list[JsonObject] = []
        """Items that are whole."""
        self._open_key: int | str | None = None
        """Index upstream of the function call that is written, or "text"."""
        self._open_item: JsonObject = {}
        self._content = ""
        """Text or arguments of the open item."""
        self._calls: set[int] = set()
        self._finish_reason: str | None = None

    def _error(self, refusal: Refusal) -> bytes:
        """Return an error event, which OpenAI's clients raise for its `error`."""
        error = {"code": refusal.code or None, "message": refusal.message, "param": None}
        return self._event("error", **error, error=error)

    def _begin(self, chunk: JsonObject) -> bytes:
        self._answer_id = chunk.get("id")
        self._head = response_head(self._answer_id, self._body)
        created = self._event("response.created", response=self._head)
        return created + self._event("response.in_progress", response=self._head)

    def _write(self, piece: Piece) -> bytes:
        if isinstance(piece, FinishPiece):
            self._finish_reason = piece.reason
            return b""
        if isinstance(piece, TextPiece):
            return self._open_text() + self._add(
                "response.output_text.delta", piece.text, content_index=0, logprobs=[]
            )
        if piece.index in self._calls and piece.index != self._open_key:
            raise TypeError("a tool call goes on after the next one began")
        opened = self._open_call(piece)
        if not piece.arguments:
            return opened
        return opened + self._add("response.function_call_arguments.delta", piece.arguments)

    def _open_text(self) -> bytes:
        if self._open_key == "text":
            return b""
        # A text may be followed by another one, after a function call.
        item = message_item(f"msg_{self._answer_id}_{len(self._output)}", "", "in_progress")
        opened = self._open("text", item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return opened + self._of_item("response.content_part.added", content_index=0, part=part)

    def _open_call(self, piece: CallPiece) -> bytes:
        if piece.index == self._open_key:
            return b""
        self._calls.add(piece.index)
        return self._open(piece.index, call_item(piece.call_id, piece.name, "", "in_progress"))

    def _open(self, key: int | str, item: JsonObject) -> bytes:
        closed = self._close()
        self._open_key, self._open_item, self._content = key, item, ""
        return closed + self._event(
            "response.output_item.added", output_index=len(self._output), item=item
        )

    def _add(self, kind: str, delta: str, **fields: Any) -> bytes:
        """Return the event of a delta of the open item."""
        self._content += delta
        return self._of_item(kind, delta=delta, **fields)

    def _close(self) -> bytes:
        """End the open item."""
        key, opened = self._open_key, self._open_item
        if key is None:
            return b""
        self._open_key = None
        if key == "text":
            item = message_item(opened["id"], self._content)
            text = {"text": self._content, "content_index": 0, "logprobs": []}
            closed = self._of_item("response.output_text.done", **text)
            part = item["content"][0]
            closed += self._of_item("response.content_part.done", content_index=0, part=part)
        else:
            item = call_item(opened["call_id"], opened["name"], self._content)
            closed = self._of_item(
                "response.function_call_arguments.done",
                name=opened["name"],
                arguments=self._content,
            )
        done = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return closed + done

    def _last(self) -> bytes:
        closed = self._close()
        head = self._head or response_head(self._answer_id, self._body)
        response = finished(head, self._output, self._finish_reason, self._usage)
        return closed + self._event(f"response.{response['status']}", response=response)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the open item."""
        index, item_id = len(self._output), self._open_item["id"]
        return self._event(kind, output_index=index, item_id=item_id, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return to_event(orjson.dumps({"type": kind, "sequence_number": number, **fields}), kind)
