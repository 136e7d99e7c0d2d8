"""Filling in templates whose text may come from a model: pure, and never evaluated beyond that."""

import string
from collections.abc import Mapping, Sequence
from typing import Any


class _Braces(string.Formatter):
    """`str.format` without names that start with an underscore."""

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


def fill_in_braces(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with `{name}` replaced by values, as `str.format` does it.

    Raises:
        ValueError: A brace is neither doubled nor part of a place, or a place has no value.
    """
    try:
        return _Braces().vformat(template, (), values)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the template cannot be filled in: {error}; a brace that is text is written twice"
        ) from error


def fill_in_jinja(template: str, values: Mapping[str, Any]) -> str:
    """Return the template rendered by Jinja in its sandbox.

    Raises:
        ValueError: It is malformed, names a value that is not given, or does what the sandbox
            forbids.
    """
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    try:
        return environment.from_string(template).render(values)
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the template cannot be filled in: {error}") from error
