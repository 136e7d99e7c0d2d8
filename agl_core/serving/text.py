"""The text of a response while its tokens come: whole characters, and stop texts found in time.

Values only. What is given out is final: the pieces of a stream, put together, are the text of the
same response without a stream.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_REPLACEMENT = "\ufffd"
"""What decoders give for bytes that are no character yet."""
_MAX_PENDING = 16
"""Bytes after which what became no character is given out as it is, and tokens without text after
which they are forgotten; a character of UTF-8 has at most 4 bytes."""


class IncrementalText:
    """Decodes token ids one by one, each character when its last token is there.

    Decoders may treat the first token of a text in their own way (a space is dropped), so new ids
    are decoded after ids whose text is known, and that text is taken off.

    Args:
        decode: Returns the text of token ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: list[int] = []
        self._known_text = ""
        self._pending: list[int] = []
        self._half = ""
        """The text so far that ends in a character which is not whole."""
        self._num_half = 0
        """How often that has changed."""

    def add(self, token_id: int) -> str:
        """Return the text that is certain with this token."""
        self._pending.append(token_id)
        text = self._decode([*self._known, *self._pending])
        if text.endswith(_REPLACEMENT):
            self._num_half += text != self._half
            self._half = text
            if self._num_half < _MAX_PENDING:
                return ""
        return self._take(text)

    def end(self) -> str:
        """Return what is left."""
        return self._take(self._decode([*self._known, *self._pending])) if self._pending else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._known_text) :]
        self._half, self._num_half = "", 0
        if piece:
            self._known, self._pending = self._pending, []
            self._known_text = self._decode(self._known)
        elif len(self._pending) >= _MAX_PENDING:  # special tokens, which have no text
            self._pending = []
        return piece


class Found(NamedTuple):
    """What is certain after a piece of text."""

    text: str
    """To give out."""
    stop: str | None
    """The stop text that ended the response, or None."""


class StopTexts:
    """Finds the first of some texts in pieces, wherever these are split.

    Args:
        texts: None of them empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._held = ""
        """A proper beginning of some stop text, at the end of what came."""

    def add(self, piece: str) -> Found:
        """Return the text that no stop text can begin in any more."""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._texts if stop in text]
        if found:
            start, stop = min(found, key=lambda place: place[0])
            self._held = ""
            return Found(text[:start], stop)
        num_held = max((overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - num_held :]
        return Found(text[: len(text) - num_held], None)

    def end(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper beginning of `mark` that `text` ends with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
