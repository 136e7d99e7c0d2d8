"""Datasets as JSON Lines: each line one task."""

import json
from pathlib import Path

from agl_core.errors import ConfigError


def read_jsonl(path: str) -> list[str]:
    """Return each row as canonical JSON text.

    Raises:
        ConfigError: The file is missing or empty, is not UTF-8, or a line is not JSON; the message
            names the line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"dataset {path} does not exist")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"dataset {path} is not UTF-8: {error}") from error
    rows: list[str] = []
    # Not splitlines: a row may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.dumps(json.loads(line), sort_keys=True))
        except json.JSONDecodeError as error:
            raise ConfigError(f"dataset {path}, line {number} is not JSON: {error.msg}") from error
    if not rows:
        raise ConfigError(f"dataset {path} has no rows")
    return rows
