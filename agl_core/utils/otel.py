"""Attributes of spans, under Agent Lightning's path; they live in `agl_core.tracer.attributes`.
And OpenTelemetry's provider of the running code.
"""

from opentelemetry import trace as otel

from agl_core.tracer.attributes import (
    check_attributes_sanity,
    extract_links_from_attributes,
    extract_tags_from_attributes,
    filter_and_unflatten_attributes,
    filter_attributes,
    flatten_attributes,
    format_exception_attributes,
    full_qualified_name,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
    sanitize_attribute_value,
    sanitize_attributes,
    unflatten_attributes,
)
from agl_core.tracer.current import get_active_tracer
from agl_core.tracer.global_provider import HasProvider

__all__ = [
    "check_attributes_sanity",
    "extract_links_from_attributes",
    "extract_tags_from_attributes",
    "filter_and_unflatten_attributes",
    "filter_attributes",
    "flatten_attributes",
    "format_exception_attributes",
    "full_qualified_name",
    "get_tracer",
    "get_tracer_provider",
    "make_link_attributes",
    "make_tag_attributes",
    "query_linked_spans",
    "sanitize_attribute_value",
    "sanitize_attributes",
    "unflatten_attributes",
]


def get_tracer_provider() -> otel.TracerProvider:
    """Return OpenTelemetry's provider of the active tracer: of the attempt that the code runs in.

    Raises:
        RuntimeError: No tracer is active, or it records nothing by OpenTelemetry.
    """
    tracer = get_active_tracer()
    if not isinstance(tracer, HasProvider):
        raise RuntimeError("no tracer that records by OpenTelemetry is active here")
    return tracer.provider


def get_tracer() -> otel.Tracer:
    """Return OpenTelemetry's tracer whose spans belong to the attempt that the code runs in.

    Raises:
        RuntimeError: No tracer is active, or it records nothing by OpenTelemetry.
    """
    return get_tracer_provider().get_tracer("agl_core")
