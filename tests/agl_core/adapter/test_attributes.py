from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.adapter import attributes
from agl_core.adapter.attributes import parse_literal, unflatten


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({}, None),
        ({"other.a": 1, "px": 2, "p": 3}, None),
        ({"p.a": 1, "p.b.c": 2}, {"a": 1, "b": {"c": 2}}),
        ({"p.1": "b", "p.0": "a", "p.10": "c"}, ["a", "b", "c"]),
        ({"p.0.x": 1, "p.2.x": 2}, [{"x": 1}, {"x": 2}]),
        ({"p.0": 1, "p.a": 2}, {"0": 1, "a": 2}),
        ({"p.a": 1, "p.a.b": 2}, {"a": {"b": 2}}),
        ({"p.a.b": 2, "p.a": 1}, {"a": {"b": 2}}),
        ({"p.\N{SUPERSCRIPT TWO}": 1}, {"\N{SUPERSCRIPT TWO}": 1}),
    ],
)
def test_dotted_names_become_structure(recorded: dict[str, Any], expected: Any):
    assert unflatten(recorded, "p") == expected


def test_a_name_of_ten_thousand_parts_is_read():
    assert unflatten({"p." + "a." * 10_000 + "b": 1}, "p") is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]", [1, 2]),
        ("{'a': None, 'b': (1,)}", {"a": None, "b": (1,)}),
        ([1], [1]),
        (None, None),
        ("__import__('os')", None),
        ("[1, 2", None),
        ("(" * 100_000, None),
        ("-" * 100_000 + "1", None),
    ],
)
def test_literals_are_read_and_nothing_is_run(text: Any, expected: Any):
    assert parse_literal(text) == expected


def test_a_literal_beyond_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attributes, "MAX_LITERAL_CHARS", 5)
    assert parse_literal("('a',)") is None
    assert parse_literal("('',)") == ("",)


@given(st.text())
def test_no_text_is_an_error(text: str):
    parse_literal(text)
