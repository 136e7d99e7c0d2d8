"""Exceptions that an agent caught and wants recorded in its attempt."""

from collections.abc import Mapping
from typing import Any

from agl_core import semconv
from agl_core.emitter.emit import emit
from agl_core.tracer.attributes import format_exception_attributes, safe_str
from agl_core.types.tracer import SpanCoreFields, TraceStatus


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Record an exception in the current attempt and return its span, whose status is ERROR.

    Args:
        exception: With its traceback, if it was raised.
        attributes: Further attributes of the span.
        propagate: Whether the active tracer records it; else it is only returned.

    Raises:
        RuntimeError: The code runs outside of any attempt.
        TypeError: It is not an exception.
        ValueError: An attribute's name is not a string, or its value is not a primitive.
    """
    if not isinstance(exception, BaseException):
        raise TypeError(f"Expected a BaseException instance, got: {type(exception).__name__}")
    return emit(
        semconv.EXCEPTION_SPAN,
        {**(attributes or {}), **format_exception_attributes(exception)},
        propagate=propagate,
        status=TraceStatus(status_code="ERROR", description=safe_str(exception)),
    )
