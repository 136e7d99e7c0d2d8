"""What users write as JSON or YAML is a value that a record can keep, or one sentence."""

from pathlib import Path

import pytest

from agl_core.errors import ConfigError
from agl_core.text_formats import parse_json, read_yaml

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a": {DIGITS}}}',
        "[" * 200_000,
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        "{",
        b'"\xff"',
    ],
)
def test_json_that_a_record_cannot_keep_is_refused(text: str | bytes):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the reason differs by case
        parse_json(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a: {DIGITS}", "digits"),
        ("a: 2024-02-31", "day"),
        ("b: {a: 2024-02-28}", "b.a is a date"),
        ("a: " + "[" * 20_000, "nested too deeply"),
        ("a: &x [*x]", "nested too deeply"),
        ("a: .nan", "a is nan"),
        ("a: [1, -.inf]", r"a\[1\] is -inf"),
        ("a: !!binary aGk=", "put it in quotes"),
        ("a: [", "is not YAML"),
    ],
)
def test_yaml_that_a_record_cannot_keep_is_one_sentence(tmp_path: Path, text: str, reason: str):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_yaml(file, "configuration run.yaml")
    assert str(caught.value).startswith("configuration run.yaml")


def test_yaml_may_begin_with_a_bom(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(file, "x") == {"a": 1}
