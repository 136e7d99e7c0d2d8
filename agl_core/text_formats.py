"""JSON and YAML that users write: parsed, or refused with one sentence.

Both parsers take more than a ledger can keep, and fail in more ways than their own errors say:
numbers of thousands of digits, dates that do not exist, nesting that ends the interpreter's stack,
NaN and infinity. Every such text is a `ConfigError` here.
"""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from agl_core.errors import ConfigError

_TOO_DEEP = "it is nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: The text is not JSON, or holds a number that is not finite or too long; the
            message is the reason.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(error.msg) from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def read_yaml(path: Path, what: str) -> Any:
    """Return what a YAML file holds: null, texts, truth values, finite numbers, lists, mappings.

    Args:
        path: The file.
        what: Names it in errors, for example `configuration run.yaml`.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or holds what a record in JSON cannot.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        _refuse_others(found, "")
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{what} is not usable YAML: {_TOO_DEEP}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{what} is not YAML: {error}") from error
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _refuse_others(value: Any, place: str) -> None:
    """Return if a value can be kept as JSON.

    Raises:
        ValueError: It cannot; the message names its place.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_others(item, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_others(item, f"{place}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place or 'the value'} is {value}; give a finite number")
    elif value is not None and not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ValueError(f"{place or 'the value'} is a {kind} ({value!s}); put it in quotes")
