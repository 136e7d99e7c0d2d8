from opentelemetry import trace as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as OtelEvent

from agl_core.types.tracer import Event, Link, OtelResource, Span, TraceStatus


def test_the_parts_of_opentelemetrys_span_become_records():
    context = otel.SpanContext(trace_id=1, span_id=2, is_remote=True)
    link = Link.from_opentelemetry(otel.Link(context, {"why": "retry"}))
    assert (link.context.trace_id, link.context.span_id) == (f"{1:032x}", f"{2:016x}")
    assert link.attributes == {"why": "retry"}
    event = Event.from_opentelemetry(OtelEvent("lost", {"n": 1}, timestamp=2_000_000_000_000_000))
    assert (event.name, event.attributes, event.timestamp) == ("lost", {"n": 1}, 2e6)
    resource = OtelResource.from_opentelemetry(Resource({"host.name": "here"}, "https://schema"))
    assert (resource.attributes, resource.schema_url) == ({"host.name": "here"}, "https://schema")


def test_a_span_that_nobody_recorded_has_the_status_that_is_given():
    assert Span.from_attributes(attributes={}).status.status_code == "OK"
    failed = Span.from_attributes(attributes={}, status=TraceStatus(status_code="ERROR"))
    assert failed.status.status_code == "ERROR"
