from pathlib import Path

import pytest

from agl_core.dataset import read_jsonl
from agl_core.errors import ConfigError


def test_only_a_newline_ends_a_row(tmp_path: Path):
    text = "first\u2028second\u0085third"
    (tmp_path / "rows.jsonl").write_text(f'{{"q": "{text}"}}\r\n\n{{"q": 2}}', encoding="utf-8")
    first, second = read_jsonl(str(tmp_path / "rows.jsonl"))
    assert first == r'{"q": "first\u2028second\u0085third"}'
    assert second == '{"q": 2}'


def test_another_encoding_is_said(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes('{"q": "\u00e9"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"rows\.jsonl is not UTF-8"):
        read_jsonl(str(tmp_path / "rows.jsonl"))
