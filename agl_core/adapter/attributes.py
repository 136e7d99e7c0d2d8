"""Structure in span attributes: dotted names, JSON, and Python literals, from other people's code.

What cannot be read is None, never an error: a span may hold anything.
"""

import ast
from collections.abc import Mapping
from typing import Any

import orjson

MAX_DEPTH = 32
"""Parts of a dotted name that count; the rest of a longer one stays together."""
MAX_LITERAL_CHARS = 4_000_000
"""Longest Python literal that is parsed: it takes some hundred times its size in memory."""


def unflatten(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return what is recorded under a dotted prefix as nested dicts and lists, or None.

    Names that are all numbers make a list in their order: `p.0.role` and `p.2.role` under `p` give
    two entries. Where a name has both a value and names below it, those below count.
    """
    start = f"{prefix}."
    root: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.startswith(start):
            _put(root, name[len(start) :].split(".", MAX_DEPTH), value)
    return _with_lists(root) if root else None


def _put(root: dict[str, Any], path: list[str], value: Any) -> None:
    node = root
    for part in path[:-1]:
        below = node.get(part)
        if not isinstance(below, dict):
            below = node[part] = {}
        node = below
    if not isinstance(node.get(path[-1]), dict):
        node[path[-1]] = value


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    nested = {name: _with_lists(entry) for name, entry in value.items()}
    if all(name.isascii() and name.isdecimal() for name in nested):
        return [nested[name] for name in sorted(nested, key=_number)]
    return nested


def _number(digits: str) -> tuple[int, str]:
    """Return what orders decimal numbers; `int` takes 4300 digits at most."""
    significant = digits.lstrip("0")
    return len(significant), significant


def parse_json(value: Any) -> Any:
    """Return a JSON text as its value, anything but text as it is, and other text as None."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return None


def parse_literal(value: Any) -> Any:
    """Return the value of a JSON text or, failing that, of a Python literal of bounded size."""
    parsed = parse_json(value)
    if parsed is not None or not isinstance(value, str) or len(value) > MAX_LITERAL_CHARS:
        return parsed
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def as_dict(value: Any) -> dict[str, Any]:
    """Return a mapping as a dict, and anything else as an empty one."""
    return dict(value) if isinstance(value, dict | Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, and anything else as an empty one."""
    return list(value) if isinstance(value, list | tuple) else []
