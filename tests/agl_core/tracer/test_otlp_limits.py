import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_core.tracer import otlp_limits
from agl_core.tracer.otlp_limits import check_limits


def request(num_spans: int, num_values: int = 0, resource: str = "") -> bytes:
    export = ExportTraceServiceRequest()
    group = export.resource_spans.add()
    group.resource.attributes.add(key="text").value.string_value = resource
    spans = group.scope_spans.add().spans
    for _ in range(num_spans):
        values = spans.add(name="llm").attributes.add(key="ids").value.array_value.values
        for _ in range(num_values):
            values.add().int_value = 70_000
    return export.SerializeToString()


def test_ten_thousand_spans_with_token_ids_pass():
    check_limits(request(10_000, 20))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (request(60_000), "more than 50000 spans"),
        (b"\x10\x01" * 3_100_000, "more than 3000000 fields"),
        (b"\x0a\x00" * 160_000, "more than 150000 resources, scopes, spans, events and links"),
        (request(1_000, 0, "x" * 100_000), "resources of the spans"),
        (b"\x0b" * 60_000, "groups"),
    ],
)
def test_requests_that_make_too_many_objects_are_refused_unparsed(body: bytes, reason: str):
    with pytest.raises(ValueError, match=reason):
        check_limits(body)


def test_a_request_that_is_cut_short_is_left_to_the_parser():
    check_limits(request(10_000)[:-1])
    assert otlp_limits.MAX_SPANS >= 10_000
