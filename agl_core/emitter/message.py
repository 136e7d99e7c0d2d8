"""Messages: lines of text that an agent records in its attempt."""

from collections.abc import Mapping
from typing import Any

from agl_core import semconv
from agl_core.emitter.emit import emit
from agl_core.types.tracer import SpanCoreFields, SpanLike


def emit_message(
    message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Record a message in the current attempt and return it.

    Args:
        message: The text.
        attributes: Further attributes of the span.
        propagate: Whether the active tracer records it; else it is only returned.

    Raises:
        RuntimeError: The code runs outside of any attempt.
        TypeError: The message is not a string.
        ValueError: An attribute's name is not a string, or its value is not a primitive.
    """
    if not isinstance(message, str):
        raise TypeError(
            f"Message must be a string, got: {type(message).__name__}; emit_object "
            "takes other values"
        )
    recorded = {**(attributes or {}), semconv.MESSAGE_BODY: message}
    return emit(semconv.MESSAGE_SPAN, recorded, propagate=propagate)


def get_message_value(span: SpanLike) -> str | None:
    """Return the message that a span records, or None.

    Raises:
        TypeError: What is recorded as a message is not a string.
    """
    message = (span.attributes or {}).get(semconv.MESSAGE_BODY)
    if message is not None and not isinstance(message, str):
        raise TypeError(
            "Message must be a string or list of strings, got: "
            f"{type(message).__name__} in span {span.name!r}"
        )
    return message
