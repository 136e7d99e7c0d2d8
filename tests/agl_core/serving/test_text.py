import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agl_core.serving.text import IncrementalText, StopTexts, overlap


def decode_bytes(token_ids: Sequence[int]) -> str:
    """Decode one byte for each id, as byte-level tokenizers do; ids from 256 are special."""
    return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """Decode a word for each id, as SentencePiece does: without the first space."""
    return "".join(f" w{token_id}" for token_id in token_ids)[1:]


@given(st.text(), st.lists(st.integers(0, 20)))
@example("\U00010000", [0] * 13)
@example("\U00010000", [2] * 20)
def test_pieces_are_the_whole_text_and_hold_whole_characters(text: str, special: list[int]) -> None:
    ids = list(text.encode())
    for place in special:
        ids.insert(place, 256)
    pieces = IncrementalText(decode_bytes)
    found = [pieces.add(token_id) for token_id in ids]
    assert "".join(found) + pieces.end() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@given(st.lists(st.integers(0, 50)))
def test_the_space_before_a_word_is_kept_after_the_first(ids: list[int]) -> None:
    pieces = IncrementalText(decode_words)
    assert "".join(map(pieces.add, ids)) + pieces.end() == decode_words(ids)


def test_half_a_character_comes_as_a_replacement_at_the_end() -> None:
    pieces = IncrementalText(decode_bytes)
    half = "\u20ac".encode()[:2]
    assert [pieces.add(byte) for byte in half] == ["", ""]
    assert pieces.end() == "\ufffd"


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    pieces = IncrementalText(decode_bytes)
    found = [pieces.add(0x80) for _ in range(100)]
    assert 0 < sum(map(bool, found)) <= 100 / 16
    assert "".join(found) + pieces.end() == "\ufffd" * 100


def test_many_special_tokens_leave_nothing_behind() -> None:
    pieces = IncrementalText(decode_bytes)
    assert "".join(map(pieces.add, [*b"a", *[300] * 40, *b"b"])) + pieces.end() == "ab"


def split(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@given(
    st.text("ab\n", max_size=20),
    st.lists(st.integers(0, 20)),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_texts_are_found_wherever_the_text_is_split(
    text: str, places: list[int], stops: list[str]
) -> None:
    finder, given_out, stop = StopTexts(stops), "", None
    for piece in split(text, places):
        found = finder.add(piece)
        given_out += found.text
        if stop := found.stop:
            break
    places_of = [(text.find(s), s) for s in stops if s in text]
    if not places_of:
        assert (given_out + finder.end(), stop) == (text, None)
        return
    # Whichever text is complete first ends the response: later pieces are never seen.
    assert stop is not None
    assert text.startswith(given_out + stop)
    assert not any(s in given_out for s in stops)


def test_the_first_of_several_stop_texts_ends_the_text() -> None:
    assert StopTexts(["cd", "b"]).add("abcd") == ("a", "b")


@pytest.mark.parametrize(
    ("text", "mark", "length"),
    [("ab", "bc", 1), ("abc", "abc", 0), ("ab", "abc", 2), ("", "ab", 0), ("aab", "abab", 2)],
)
def test_overlap_is_the_longest_proper_beginning(text: str, mark: str, length: int) -> None:
    assert overlap(text, mark) == length
