"""JSON text that gives back what was put in, at orjson's speed where orjson can."""

from typing import Any

import orjson
from pydantic_core import PydanticSerializationError, from_json, to_json

from agl_core.errors import StoreError


def encode(value: Any, what: str = "value") -> str:
    """Return a value as JSON text; models and dataclasses become objects, arrays lists, NaN and
    infinities stay (as `NaN`, `Infinity`), which orjson alone would turn into null.

    Args:
        value: Anything JSON has a form for.
        what: Its name for the error.

    Raises:
        StoreError: It has no form in JSON.
    """
    try:
        text = orjson.dumps(value)
        if b"null" not in text:
            return text.decode()
    except TypeError:
        pass  # a model, a key that is no string, an integer of more than 64 bits
    try:
        return to_json(value, inf_nan_mode="constants", fallback=_plain).decode()
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise StoreError(f"{what} cannot be kept as JSON: {error}") from error


def decode(text: str) -> Any:
    """Return the value of a text by `encode`."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return from_json(text)


def _plain(value: Any) -> Any:
    # numpy arrays and scalars, torch tensors.
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
