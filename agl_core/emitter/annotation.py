"""Annotations: what an agent wants recorded about its attempt, as a span without duration."""

from collections.abc import Mapping
from typing import Any

from agl_core import semconv
from agl_core.emitter.emit import emit
from agl_core.emitter.operation import OperationContext as OperationContext  # Agent Lightning has
from agl_core.emitter.operation import operation as operation  # both here
from agl_core.types.tracer import SpanCoreFields


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> SpanCoreFields:
    """Record an annotation in the current attempt and return it.

    Args:
        annotation: Names to primitives, or to further mappings and lists, which are flattened:
            `{"a": {"b": [1, "x"]}}` becomes `a.b.0` and `a.b.1`; a list of one type of primitives
            stays one attribute.
        propagate: Whether the active tracer records it; else it is only returned.

    Raises:
        RuntimeError: The code runs outside of any attempt.
        ValueError: A name is not a string, is empty or there twice once flattened, or a value is
            not a primitive.
    """
    return emit(semconv.ANNOTATION_SPAN, annotation, propagate=propagate)
