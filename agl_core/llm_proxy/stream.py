"""Puts the chunks of a streamed chat completion together to the answer without a stream.

Values only.
"""

from collections.abc import Mapping
from typing import Any

from agl_core import semconv
from agl_core.llm_proxy.answer_shape import MALFORMED, check_message
from agl_core.llm_proxy.capture import JsonObject, choice_attribute

_WHOLE_NAMES = frozenset({"role", "id", "type", "index"})
"""Of a delta: servers repeat them; everything else of text is in pieces."""
_MAX_CHOICES = 1024
"""Far above what a request may ask for."""


class _Choice:
    """One choice so far."""

    def __init__(self) -> None:
        self.message: JsonObject = {"role": "assistant", "content": None}
        self.logprobs: dict[str, list[Any]] = {}
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.more: JsonObject = {}
        """What else the server says of it, such as vLLM's `stop_reason`."""

    def add(self, choice: JsonObject) -> None:
        """Take its part of a chunk."""
        delta = choice.get("delta") or {}
        if reason := check_message(delta):
            raise ValueError(reason)
        _merge(self.message, delta)
        for name, entries in (choice.get("logprobs") or {}).items():
            if entries is not None:
                self.logprobs.setdefault(name, []).extend(entries)
        ids = choice.get("token_ids") or []
        if not set(map(type, ids)) <= {int}:
            raise ValueError("token_ids are not integers")
        self.token_ids += ids
        if not isinstance(choice.get("finish_reason"), str | None):
            raise ValueError(f"finish_reason is {choice['finish_reason']!r}, not a text")
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if choice.get("stop_reason") is not None:
            self.more["stop_reason"] = choice["stop_reason"]

    def whole(self, index: int, *, is_complete: bool) -> JsonObject:
        """Return it as an answer without a stream has it."""
        return {
            "index": index,
            "message": self._whole_message(),
            "logprobs": (self.logprobs or None) if is_complete else None,
            "finish_reason": self.finish_reason,
            **self.more,
            "token_ids": (self.token_ids or None) if is_complete else None,
        }

    def _whole_message(self) -> JsonObject:
        """Return the message without what only streams have."""
        message = dict(self.message)
        if calls := message.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in calls
            ]
        return message


class StreamedAnswer:
    """Puts chunks together to the chat completion that the same call gives without a stream.

    Token ids and log-probs are left out while any could be missing.

    Args:
        num_choices: How many choices were asked for.
    """

    def __init__(self, num_choices: int = 1) -> None:
        self.defect: str | None = None
        """Why the answer is not whole; no more chunks are taken then."""
        self._num_choices = num_choices
        self._num_chunks = 0
        self._head: JsonObject = {}
        self._choices: dict[int, _Choice] = {}

    @property
    def has_finished(self) -> bool:
        """Whether every choice said why it ended, so that all tokens came."""
        if self.defect or len(self._choices) < self._num_choices:
            return False
        return all(choice.finish_reason is not None for choice in self._choices.values())

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
        except MALFORMED as error:
            self.spoil(f"a chunk is not one of a chat completion: {error}")

    def _add(self, chunk: JsonObject) -> None:
        if not isinstance(chunk.get("usage") or {}, dict):
            raise TypeError("usage is not a JSON object")
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                self._head[name] = value
        for choice in chunk["choices"]:
            index = choice.get("index", 0)
            if type(index) is not int or not 0 <= index < _MAX_CHOICES:
                raise ValueError(f"{index!r} is not the index of a choice")
            self._choices.setdefault(index, _Choice()).add(choice)

    def answer(self) -> JsonObject | None:
        """Return the chat completion so far; None where no chunk came."""
        if not self._num_chunks:
            return None
        is_complete = self.has_finished
        self._choices.setdefault(0, _Choice())
        ids = self._head.get("prompt_token_ids") if is_complete else None
        return {
            **self._head,
            "object": "chat.completion",
            "prompt_token_ids": ids,
            "choices": [
                self._choices[index].whole(index, is_complete=is_complete)
                for index in sorted(self._choices)
            ],
        }


def find_hole(attributes: Mapping[str, Any]) -> str | None:
    """Return why recorded token ids cannot be all of an answer's, or None."""
    counted = attributes.get(semconv.OUTPUT_TOKENS)
    if attributes.get(semconv.RESPONSE_TOKEN_IDS) is None or counted is None:
        return None
    num_choices = len(attributes.get(semconv.FINISH_REASONS, ("",)))
    names = [choice_attribute(semconv.RESPONSE_TOKEN_IDS, n) for n in range(num_choices)]
    num_ids = sum(len(attributes.get(name, ())) for name in names)
    if num_ids == counted:
        return None
    return f"{num_ids} response token ids came, the model server counts {counted}"


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
