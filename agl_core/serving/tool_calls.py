"""Tool calls in a response's text, as models of the Hermes family write them.

    I look it up. <tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>

Values only. A block that is not such an object stays text as it came. White space after a call is
dropped. The pieces of a stream give the same as the whole text.
"""

import json
from typing import Any, NamedTuple

from agl_core.serving.text import overlap

_BEGIN, _END = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """One call that a response asks for."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCallParser:
    """Finds tool calls in pieces of text."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Calls found so far."""
        self._held = ""
        """What is not decided yet."""
        self._is_inside = False
        """Whether it began with `<tool_call>`, which is not in it."""
        self._num_searched = 0
        """Characters of it that hold no end of a block."""
        self._space = ""
        """White space after a call, which counts if text follows."""

    def add(self, text: str) -> list[str | ToolCall]:
        """Return text and calls that are certain now, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        while self._is_inside or _BEGIN in self._held:
            if not self._is_inside:
                before, self._held = self._held.split(_BEGIN, 1)
                found += self._text(before)
                self._is_inside, self._num_searched = True, 0
            end = self._held.find(_END, max(0, self._num_searched - len(_END)))
            if end < 0:
                self._num_searched = len(self._held)
                return found
            block, self._held = self._held[:end], self._held[end + len(_END) :]
            self._is_inside = False
            found += self._block(block, _END)
        num_held = overlap(self._held, _BEGIN)
        certain = self._held[: len(self._held) - num_held]
        self._held = self._held[len(self._held) - num_held :]
        return found + self._text(certain)

    def end(self) -> list[str | ToolCall]:
        """Return what is left where the response ends; a call may lack its end."""
        held, self._held = self._held, ""
        return self._block(held, "") if self._is_inside else self._text(held)

    def _block(self, block: str, end: str) -> list[str | ToolCall]:
        call = _parse(block)
        if call is None:
            return self._text(f"{_BEGIN}{block}{end}")
        self.num_calls += 1
        self._space = ""
        return [call]

    def _text(self, text: str) -> list[str | ToolCall]:
        text = self._space + text
        if self.num_calls and not text.strip():
            self._space = text
            return []
        self._space = ""
        return [text] if text else []


def _parse(block: str) -> ToolCall | None:
    """Return the call that a block holds, or None."""
    try:
        call: Any = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
