"""Filling in templates whose text may come from a model: pure, and never evaluated beyond that.

A template cannot reach what is private, call what the values can do, make a text beyond
`MAX_CHARS`, or compute for long: Jinja's templates have a budget (`template_sandbox`).
"""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

MAX_CHARS = 10_000_000
"""Of a filled-in template."""
MAX_WIDTH = 10_000
"""Of one place, by its format, and the largest factor or exponent."""

_MAX_BRACES = 200_000
"""Of a template; filling in a place takes some microseconds."""


class _Braces(string.Formatter):
    """`str.format` without names that start with an underscore, and with bounds."""

    def __init__(self) -> None:
        self._num_chars = 0

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        if "._" in field_name or "[_" in field_name:
            raise ValueError(f"the place {{{field_name}}} names something private")
        return super().get_field(field_name, args, kwargs)

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, str) and key in kwargs:
            return kwargs[key]
        given = ", ".join(sorted(kwargs)) or "none"
        raise ValueError(f"no value for the place {{{key}}} (given: {given})")

    def format_field(self, value: Any, format_spec: str) -> str:
        _check_widths(format_spec)
        text = super().format_field(value, format_spec)
        self._num_chars += len(text)
        _check_size(self._num_chars)
        return text


def fill_in_braces(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with `{name}` replaced by values, as `str.format` does it.

    Raises:
        ValueError: A brace is neither doubled nor part of a place, a place has no value, or the
            text is too long.
    """
    try:
        _check_size(len(template))
        if template.count("{") > _MAX_BRACES:
            raise ValueError(f"it has more than {_MAX_BRACES} braces")
        return _Braces().vformat(template, (), values)
    except Exception as error:  # code of the values runs in there, and may raise anything
        raise ValueError(
            f"the template cannot be filled in: {_reason(error)}; a brace that is text is written "
            "twice"
        ) from error


def fill_in_jinja(template: str, values: Mapping[str, Any]) -> str:
    """Return the template rendered by Jinja in its sandbox, which calls no code of the values but
    what gives them as text.

    Raises:
        ValueError: It is malformed, names a value that is not given, does what the sandbox forbids,
            or makes too long a text.
    """
    from agl_core.types import template_sandbox as sandbox  # jinja2 for those who use it

    try:
        parts: list[str] = []
        _check_size(len(template))
        num_chars = 0
        for part in sandbox.render_parts(sandbox.compile_template(template), values):
            num_chars += len(part)
            _check_size(num_chars)
            parts.append(part)
        return "".join(parts)
    except Exception as error:  # code of the values runs in there, and may raise anything
        raise ValueError(f"the template cannot be filled in: {_reason(error)}") from error


def check_format(text: str | bytes, values: Any) -> None:
    """Refuse a format whose widths are large, or taken from the values (`*`)."""
    for place in re.findall(r"%(?:\([^)]*\))?[-#0 +]*([\d.*]*)", str(text)):
        _check_widths(place)
        if "*" in place:
            raise ValueError(f"the format {text!r:.80} takes a width from {values!r:.80}")


def _check_widths(specification: str) -> None:
    for digits in re.findall(r"\d+", specification):
        if len(digits.lstrip("0")) > len(str(MAX_WIDTH)) or int(digits) > MAX_WIDTH:
            refuse_number(digits)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise ValueError(f"it makes a text of more than {MAX_CHARS} characters")


def refuse_number(number: object) -> NoReturn:
    """Raise ValueError: a number makes too long a text."""
    raise ValueError(f"the number {number!s:.20} is more than {MAX_WIDTH}")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
