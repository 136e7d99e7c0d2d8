"""Annotations: what an agent wants recorded about its attempt, as a span without duration."""

from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from agl_core import semconv
from agl_core.tracer.base import get_active_tracer

Primitive = str | bool | int | float


def emit_annotation(annotation: Mapping[str, Any]) -> ReadableSpan:
    """Record an annotation in the current attempt and return its span.

    Args:
        annotation: Names to primitives, or to further mappings and lists, which are flattened:
            `{"a": {"b": [1, 2]}}` becomes `a.b.0` and `a.b.1`.

    Raises:
        RuntimeError: The code runs outside of any attempt.
        ValueError: A name is not a string, or a value is not a primitive.
    """
    attributes = flatten_attributes(annotation)
    tracer = get_active_tracer()
    if tracer is None:
        raise RuntimeError(
            "no active attempt: annotations and rewards are emitted by an agent while it runs "
            "(a thread that the agent starts needs its context: contextvars.copy_context().run)"
        )
    return tracer.create_span(semconv.ANNOTATION_SPAN, attributes)


def flatten_attributes(nested: Mapping[str, Any]) -> dict[str, Primitive]:
    """Return the leaves of nested mappings and lists under dotted names.

    Raises:
        ValueError: A name is not a string, or a leaf is not a primitive.
    """
    return dict(_leaves("", nested))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Primitive]]:
    if isinstance(value, Primitive):
        yield path, value
        return
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, list | tuple):
        entries = [(str(number), entry) for number, entry in enumerate(value)]
    else:
        raise ValueError(
            f"attribute {path!r} is a {type(value).__name__}; only str, bool, int, float, dicts "
            "and lists of them can be recorded"
        )
    for name, entry in entries:
        if not isinstance(name, str):
            raise ValueError(f"attribute name {name!r} under {path!r} is not a string")
        yield from _leaves(f"{path}.{name}" if path else name, entry)
