"""Objects: values that an agent records in its attempt, to be read back from the span.

type     the value's class         str, int, float, bool, bytes (subclasses too), else its full name
literal  text of a primitive       base64 for bytes
json     anything else
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from agl_core import semconv
from agl_core.emitter.emit import emit
from agl_core.tracer.attributes import full_qualified_name
from agl_core.types.tracer import SpanCoreFields, SpanLike


def emit_object(
    object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Record a value in the current attempt and return its span.

    Args:
        object: A primitive, bytes, or anything that JSON can express.
        attributes: Further attributes of the span.
        propagate: Whether the active tracer records it; else it is only returned.

    Raises:
        RuntimeError: The value is none of these, or the code runs outside of any attempt.
        ValueError: An attribute's name is not a string, or its value is not a primitive.
    """
    recorded = {**(attributes or {}), **encode_object(object)}
    return emit(semconv.OBJECT_SPAN, recorded, propagate=propagate)


def encode_object(object: Any) -> dict[str, str]:
    """Return the attributes that record a value.

    Raises:
        RuntimeError: JSON cannot express it.
    """
    kind = "bytes" if isinstance(object, bytes) else full_qualified_name(type(object))
    if isinstance(object, bytes):
        literal = base64.b64encode(object).decode("ascii")
    elif kind in _DECODERS:
        try:
            literal = str(object)
        except ValueError as error:  # Python makes no text of more than 4300 digits
            raise RuntimeError(f"this {kind} cannot be recorded: {error}") from error
    else:
        return {semconv.OBJECT_TYPE: kind, semconv.OBJECT_JSON: _to_json(object)}
    return {semconv.OBJECT_TYPE: kind, semconv.OBJECT_LITERAL: literal}


def _to_json(object: Any) -> str:
    try:
        return json.dumps(object)
    except (TypeError, ValueError, RecursionError) as error:
        raise RuntimeError(
            f"Object must be JSON serializable, got: {type(object).__name__}: {error}"
        ) from error


def get_object_value(span: SpanLike) -> Any:
    """Return the value that a span records, or None.

    Raises:
        RuntimeError: The recorded text is broken, or of an unknown type.
    """
    attributes = span.attributes or {}
    if (text := attributes.get(semconv.OBJECT_JSON)) is not None:
        try:
            return json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise RuntimeError(
                "Failed to deserialize object JSON from span: object of span "
                f"{span.name!r} is not JSON: {error}"
            ) from error
    if (literal := attributes.get(semconv.OBJECT_LITERAL)) is None:
        return None
    kind = attributes.get(semconv.OBJECT_TYPE)
    if kind not in _DECODERS:
        raise RuntimeError(
            f"Unsupported object type for literal deserialization: {kind!r}: "
            f"object of span {span.name!r} is a literal of unknown type"
        )
    try:
        return _DECODERS[kind](literal)
    except (TypeError, ValueError, KeyError) as error:
        raise RuntimeError(f"object of span {span.name!r} is no {kind}: {literal!r:.80}") from error


def _decode_bytes(literal: str) -> bytes:
    try:
        return base64.b64decode(literal, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


_DECODERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda literal: {"true": True, "false": False}[literal.lower()],
    "bytes": _decode_bytes,
}
