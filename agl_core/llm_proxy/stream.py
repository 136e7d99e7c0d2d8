"""Streamed chat completions: server-sent events, and the answer that their chunks make up.

Values only. Events are found in bytes however these are split, and keep their bytes, so that what
needs no change passes as it came. Lines end in LF or CR LF; bare CR, which the standard of events
also has, is not known to be used by any model server.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from agl_core import semconv
from agl_core.llm_proxy.capture import JsonObject

DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\n\r?\n")
_WHOLE_NAMES = frozenset({"role", "id", "type", "index"})
"""Of a delta: servers repeat them; everything else of text is in pieces."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event."""

    raw: bytes
    """All its bytes, the blank line at its end included."""

    def data(self) -> bytes:
        """Return what its `data:` lines hold; empty for a comment."""
        lines = self.raw.split(b"\n")
        data = [line[5:].rstrip(b"\r") for line in lines if line.startswith(b"data:")]
        return b"\n".join(line.removeprefix(b" ") for line in data)

    def with_data(self, data: bytes) -> bytes:
        """Return its bytes with other data, on one line."""
        other = [line for line in self.raw.splitlines() if line and not line.startswith(b"data:")]
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


class StreamedAnswer:
    """Puts chunks together to the chat completion that the same call gives without a stream.

    The first choice counts. Token ids and log-probs are left out while any could be missing.
    """

    def __init__(self) -> None:
        self.defect: str | None = None
        """Why the answer is not whole; no more chunks are taken then."""
        self._num_chunks = 0
        self._head: JsonObject = {}
        self._message: JsonObject = {"role": "assistant", "content": None}
        self._logprobs: dict[str, list[Any]] = {}
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None

    @property
    def has_finished(self) -> bool:
        """Whether the choice said why it ended, so that all its tokens came."""
        return self._finish_reason is not None and self.defect is None

    def spoil(self, reason: str) -> None:
        """Leave out token ids and log-probs; the first reason is kept."""
        self.defect = self.defect or reason

    def add(self, chunk: Any) -> None:
        """Take one chunk, as JSON has it."""
        if self.defect:
            return
        self._num_chunks += 1
        try:
            if chunk.get("error"):
                self.spoil(f"the model server broke off: {chunk['error']}")
            else:
                self._add(chunk)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.spoil(f"a chunk is not one of a chat completion: {error}")

    def _add(self, chunk: JsonObject) -> None:
        if not isinstance(chunk.get("usage") or {}, dict):
            raise TypeError("usage is not a JSON object")
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                self._head[name] = value
        for choice in chunk["choices"]:
            if choice.get("index", 0) == 0:
                self._add_choice(choice)

    def _add_choice(self, choice: JsonObject) -> None:
        _merge(self._message, choice.get("delta") or {})
        for name, entries in (choice.get("logprobs") or {}).items():
            if entries is not None:
                self._logprobs.setdefault(name, []).extend(entries)
        ids = choice.get("token_ids") or []
        if any(type(token_id) is not int for token_id in ids):
            raise ValueError("token_ids are not integers")
        self._token_ids += ids
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def answer(self) -> JsonObject | None:
        """Return the chat completion so far; None where no chunk came."""
        if not self._num_chunks:
            return None
        is_complete = self.has_finished
        choice = {
            "index": 0,
            "message": self._whole_message(),
            "logprobs": (self._logprobs or None) if is_complete else None,
            "finish_reason": self._finish_reason,
            "token_ids": (self._token_ids or None) if is_complete else None,
        }
        ids = self._head.get("prompt_token_ids") if is_complete else None
        head = {**self._head, "object": "chat.completion", "prompt_token_ids": ids}
        return {**head, "choices": [choice]}

    def _whole_message(self) -> JsonObject:
        """Return the message without what only streams have."""
        message = dict(self._message)
        if calls := message.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in calls
            ]
        return message


def find_hole(attributes: Mapping[str, Any]) -> str | None:
    """Return why recorded token ids cannot be all, or None; for an answer with one choice."""
    ids = attributes.get(semconv.RESPONSE_TOKEN_IDS)
    counted = attributes.get(semconv.OUTPUT_TOKENS)
    if ids is None or counted is None or len(ids) == counted:
        return None
    return f"{len(ids)} response token ids came, the model server counts {counted}"


def visible_event(event: StreamEvent, chunk: Any, body: JsonObject) -> bytes:
    """Return an event without what the agent's own request `body` did not ask for.

    Args:
        event: The event.
        chunk: Its data, parsed.
        body: What the agent sent.
    """
    if not isinstance(chunk, dict):
        return event.raw
    visible = dict(chunk)
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    if not wants_usage and visible.pop("usage", None) and not visible.get("choices"):
        return b""
    if not body.get("return_token_ids"):
        visible.pop("prompt_token_ids", None)
    if isinstance(choices := chunk.get("choices"), list):
        visible["choices"] = [_visible_choice(choice, body) for choice in choices]
    return event.raw if visible == chunk else event.with_data(orjson.dumps(visible))


def _visible_choice(choice: Any, body: JsonObject) -> Any:
    if not isinstance(choice, dict):
        return choice
    visible = dict(choice)
    if not body.get("return_token_ids"):
        visible.pop("token_ids", None)
    if not body.get("logprobs") and "logprobs" in visible:
        visible["logprobs"] = None
    return visible


def _merge(whole: JsonObject, delta: JsonObject) -> None:
    """Add a delta to what came before: texts and lists grow, entries of lists by their index."""
    for name, value in delta.items():
        if value is None:
            whole.setdefault(name, None)
        elif isinstance(value, list):
            whole[name] = _merge_entries(whole.get(name) or [], value)
        elif isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _merge(whole[name], value)
        elif isinstance(value, str) and name not in _WHOLE_NAMES:
            whole[name] = (whole.get(name) or "") + value
        else:
            whole[name] = value


def _merge_entries(entries: list[Any], more: list[Any]) -> list[Any]:
    """Return the entries of a list with more of them, or pieces of those that are there.

    Raises:
        ValueError: An entry does not say which one it continues.
    """
    if not all(isinstance(entry, dict) for entry in more):
        return [*entries, *more]
    merged = list(entries)
    for entry in more:
        if entries and "index" not in entry:
            raise ValueError("an entry of a list in a delta has no index")
        index = entry.get("index")
        known = next((e for e in merged if index is not None and e.get("index") == index), None)
        if known is None:
            known = {}
            merged.append(known)
        _merge(known, entry)
    return merged
