"""Filling in templates whose text may come from a model: pure, and never evaluated beyond that.

A template cannot reach what is private, call what the values can do, or make a text beyond
`MAX_CHARS`. It can still compute for long (loops in loops): run templates of models that are out to
do harm elsewhere.
"""

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # jinja2 is imported by those who use it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 10_000_000
"""Of a filled-in template."""
MAX_WIDTH = 10_000
"""Of one place, by its format, and the largest factor or exponent."""

_TEXT_METHODS = (
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join "
    "lower lstrip partition removeprefix removesuffix rfind rpartition rsplit rstrip split "
    "splitlines startswith strip title upper"
)
_HARMLESS_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    list: frozenset(["count", "index"]),
    tuple: frozenset(["count", "index"]),
    dict: frozenset(["get", "items", "keys", "values"]),
}
_SIZED_FILTERS = ("batch", "center", "indent", "round", "slice", "wordwrap")
"""Jinja's filters that make as much text as a number says."""


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
    try:
        parts: list[str] = []
        num_chars = 0
        for part in _make_sandbox().from_string(template).generate(values):
            num_chars += len(part)
            _check_size(num_chars)
            parts.append(part)
        return "".join(parts)
    except Exception as error:  # code of the values runs in there, and may raise anything
        raise ValueError(f"the template cannot be filled in: {_reason(error)}") from error


def _make_sandbox() -> "ImmutableSandboxedEnvironment":
    from jinja2 import StrictUndefined
    from jinja2.runtime import LoopContext, Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Cycler, Joiner, Namespace

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**", "%"])

        def is_safe_callable(self, obj: Any) -> bool:
            owner = getattr(obj, "__self__", None)
            if isinstance(obj, Macro | LoopContext | Joiner) or isinstance(
                owner, LoopContext | Cycler
            ):
                return True
            if any(obj is known for known in self.globals.values()):
                return True
            return getattr(obj, "__name__", "") in _HARMLESS_METHODS.get(type(owner), ())

        def wrap_str_format(self, value: Any) -> None:
            """Leave `str.format` to `is_safe_callable`, which refuses it: it has no bounds."""

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                _check_format(left, right)
            elif operator != "%":
                _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    sandbox = Sandbox(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.globals = {
        "range": sandbox.globals["range"],
        "dict": dict,
        "cycler": Cycler,
        "joiner": Joiner,
        "namespace": Namespace,
    }
    for name in _SIZED_FILTERS:
        sandbox.filters[name] = _with_small_numbers(sandbox.filters[name])
    del sandbox.filters["format"]  # `%` does the same, with bounds
    return sandbox


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers; Jinja's marks on it are kept."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int | float) and abs(value) > MAX_WIDTH:
                _refuse_number(value)
        return function(*args, **kwargs)

    return checked


def _check_product(operator: str, left: Any, right: Any) -> None:
    """Refuse a repeated text or list, or a power, that is too large."""
    if operator == "**":
        if isinstance(right, int | float) and abs(right) > MAX_WIDTH:
            _refuse_number(right)
        return
    for repeated, number in ((left, right), (right, left)):
        if isinstance(repeated, str | bytes | list | tuple) and isinstance(number, int):
            _check_size(len(repeated) * number)


def _check_format(text: str, values: Any) -> None:
    """Refuse a format whose widths are large, or taken from the values (`*`)."""
    for place in re.findall(r"%(?:\([^)]*\))?[-#0 +]*([\d.*]*)", text):
        _check_widths(place)
        if "*" in place:
            raise ValueError(f"the format {text!r:.80} takes a width from {values!r:.80}")


def _check_widths(specification: str) -> None:
    for digits in re.findall(r"\d+", specification):
        if len(digits.lstrip("0")) > len(str(MAX_WIDTH)) or int(digits) > MAX_WIDTH:
            _refuse_number(digits)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise ValueError(f"it makes a text of more than {MAX_CHARS} characters")


def _refuse_number(number: object) -> None:
    raise ValueError(f"the number {number!s:.20} is more than {MAX_WIDTH}")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
