import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.serving.tool_calls import ToolCall, ToolCallParser

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>'
ADDED = ToolCall("add", '{"a": 1, "b": "\u00e9"}')
NOTHING = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def parse(*pieces: str) -> list[str | ToolCall]:
    """Return what the pieces hold, neighbouring texts put together."""
    parser = ToolCallParser()
    found = [part for piece in pieces for part in parser.add(piece)] + parser.end()
    joined: list[str | ToolCall] = []
    for part in found:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def test_calls_are_taken_out_of_the_text_in_order() -> None:
    text = f"I add. {ADD}\n{NOTHING}\n"
    assert parse(text) == ["I add. ", ADDED, ToolCall("f", "{}")]


def test_text_after_a_call_is_kept_with_its_space() -> None:
    assert parse(f"{ADD}\n then more") == [ADDED, "\n then more"]


@pytest.mark.parametrize(
    "block",
    [
        "",
        "add(1, 2)",
        '{"name": "add"',
        '{"name": "add"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "add", "arguments": "[1]"}',
        '["add", {}]',
        pytest.param("[" * 100_000, id="deep nesting"),
        pytest.param('{"n": ' + "1" * 5_000 + "}", id="5,000 digits"),
    ],
)
def test_a_block_that_is_no_call_stays_text_and_others_are_calls(block: str) -> None:
    text = f"<tool_call>{block}</tool_call>"
    assert parse(text) == [text]
    assert parse(f"{text} {ADD}") == [f"{text} ", ADDED]
    assert parse(f"{ADD} {text}") == [ADDED, f" {text}"]


def test_a_call_at_the_end_may_lack_its_end_mark() -> None:
    assert parse(ADD.removesuffix("</tool_call>")) == [ADDED]
    cut = ADD[:30]
    assert parse(cut) == [cut]


def test_text_is_given_out_as_soon_as_it_cannot_begin_a_call() -> None:
    parser = ToolCallParser()
    assert parser.add("a <tool") == ["a "]
    assert parser.add("s> b") == ["<tools> b"]
    assert parser.add(ADD[:-1]) == []
    assert parser.add(">") == [ADDED]


PARTS = st.sampled_from(
    [
        ADD,
        NOTHING,
        "<tool_call>",
        "</tool_call>",
        "<tool_call>x</tool_call>",
        " ",
        "text",
        "<",
        "\n",
    ]
)


@given(st.lists(PARTS, max_size=6).map("".join), st.data())
def test_pieces_give_the_same_as_the_whole(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    bounds = sorted({0, len(text), *cuts})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    found = parse(*pieces)
    assert found == parse(text)
    assert sum(isinstance(part, ToolCall) for part in found) <= text.count("<tool_call>")
    for part in found:
        assert isinstance(part, str) or isinstance(json.loads(part.arguments), dict)
