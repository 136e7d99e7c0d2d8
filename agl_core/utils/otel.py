"""Attributes of spans, under Agent Lightning's path; they live in `agl_core.tracer.attributes`.
And OpenTelemetry's provider of the running code.
"""

import logging

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

logger = logging.getLogger(__name__)

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


def get_tracer_provider(inspect: bool = True) -> otel.TracerProvider:
    """Return OpenTelemetry's provider of the active tracer: of the attempt that the code runs in.
    Outside of attempts, return the global one.

    Args:
        inspect: Whether it is written to the log, at level DEBUG, which one that is.

    Raises:
        RuntimeError: A tracer is active that records nothing by OpenTelemetry, or none is and there
            is no global provider.
    """
    tracer = get_active_tracer()
    if isinstance(tracer, HasProvider):
        provider = tracer.provider
    elif tracer is not None:
        raise RuntimeError(
            "Tracer is not initialized. Cannot emit a meaningful span: "
            f"{type(tracer).__name__} does not record by OpenTelemetry"
        )
    else:
        provider = otel.get_tracer_provider()
        if isinstance(provider, otel.ProxyTracerProvider):
            raise RuntimeError(
                "Tracer is not initialized. Cannot emit a meaningful span: no attempt runs "
                "here, and OpenTelemetry has no global "
                "provider; a tracer's init_worker (or lifespan) installs one"
            )
    if inspect:
        logger.debug("OpenTelemetry's provider here: %s", provider)
    return provider


def get_tracer(use_active_span_processor: bool = True) -> otel.Tracer:
    """Return OpenTelemetry's tracer whose spans belong to the attempt that the code runs in.

    Args:
        use_active_span_processor: False for one whose spans are recorded nowhere.

    Raises:
        RuntimeError: See `get_tracer_provider`.
    """
    if not use_active_span_processor:
        return otel.NoOpTracer()
    return get_tracer_provider().get_tracer("agl_core")
