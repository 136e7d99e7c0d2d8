"""What a model server says where it refuses a call, whatever its shape. Pure functions."""

from typing import Any

import orjson

_NAMES = ("error", "message", "detail", "msg")
"""Where OpenAI, vLLM and FastAPI keep the sentence, at some depth."""
_MAX_DEPTH = 4
_MAX_CHARS = 500


def error_sentence(content: bytes) -> str:
    """Return the sentence in an error's body, on one line; empty where there is none."""
    try:
        found: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        found = content[: 4 * _MAX_CHARS].decode(errors="replace")
    sentence = " ".join(_find(found, _MAX_DEPTH).split())
    return sentence if len(sentence) <= _MAX_CHARS else f"{sentence[:_MAX_CHARS]}..."


def describe_refusal(status: int, content: bytes) -> str:
    """Return status and sentence of a model server's error."""
    sentence = error_sentence(content)
    return f"the model server answered HTTP {status}" + (f": {sentence}" if sentence else "")


def _find(value: Any, depth: int) -> str:
    """Return the first text in the fields that hold an error's words."""
    if isinstance(value, str):
        return value
    if depth and isinstance(value, dict):
        return next(filter(None, (_find(value.get(name), depth - 1) for name in _NAMES)), "")
    if depth and isinstance(value, list):
        return "; ".join(filter(None, (_find(entry, depth - 1) for entry in value[:3])))
    return ""
