"""JSON text that gives back what was put in, at orjson's speed where orjson can.

What has no exact form in JSON is refused, with these exceptions: tuples and arrays come back as
lists, models and dataclasses as objects (a model as its own JSON says), enums as their values,
dates, times, UUIDs and paths as text, and keys that are whole numbers as text.
"""

import dataclasses
import datetime
import json
import pathlib
import uuid
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

import orjson
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from agl_core.errors import StoreError

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def encode(value: Any, what: str = "value") -> str:
    """Return a value as JSON text; NaN and infinities stay (as `NaN`, `Infinity`), which orjson
    alone would turn into null.

    Args:
        value: What a caller wants kept.
        what: Its name for the error.

    Raises:
        StoreError: It has no form in JSON: bytes, sets, an integer of more than 64 bits, keys that
            become the same text, or anything else that the module does not name.
    """
    try:
        try:
            text = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATACLASS)
            if b"null" not in text:
                return text.decode()
        except TypeError:
            value = _plain(value)
        return to_json(value, inf_nan_mode="constants").decode()
    except RecursionError as error:
        raise StoreError(f"{what} cannot be kept as JSON: it is nested too deep") from error
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise StoreError(f"{what} cannot be kept as JSON: {error}") from error


def encode_records(records: Any) -> str:
    """Return records of ours, or a list or mapping of them, as JSON text.

    Raises:
        StoreError: A value in one has no form in JSON.
    """
    try:
        return to_json(records, inf_nan_mode="constants", fallback=_plain).decode()
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise StoreError(f"a record cannot be written as JSON: {error}") from error


def decode(text: str) -> Any:
    """Return the value of a text by `encode`."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)  # it has NaN or infinities


def _plain(value: Any) -> Any:
    """Return a value as what JSON has: objects, lists, texts, numbers, true, false, null."""
    if isinstance(value, Mapping):
        return _plain_mapping(cast(Mapping[Any, Any], value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(list[Any], value)]
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json", by_alias=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, int) and not _MIN_INT <= value <= _MAX_INT:
        raise TypeError("an integer is not from -2**63 to 2**64 - 1")
    if value is None or isinstance(value, (bool, str, float, int)):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (uuid.UUID, pathlib.PurePath)):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return _plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _plain_mapping(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in mapping.items():
        name = key.value if isinstance(key, Enum) else key
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            raise TypeError(f"the key {key!r} is no text")
        if str(name) in plain:
            raise TypeError(f"two keys become the same text, {str(name)!r}")
        plain[str(name)] = _plain(value)
    return plain
