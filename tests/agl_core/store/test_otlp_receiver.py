"""OTLP/HTTP, with OpenTelemetry's own exporter and by hand."""

import asyncio
import gzip
import logging
from collections.abc import AsyncGenerator

import httpx
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl_core import semconv
from agl_core.store import InMemoryLightningStore, LightningStoreServer
from agl_core.tracer.otlp import spans_to_otlp
from agl_core.types.core import AttemptedRollout
from agl_core.types.tracer import Span
from tests.agl_core.store.builders import begin, make_span

PROTOBUF_GZIP = {"content_type": "application/x-protobuf", "content_encoding": "gzip"}


@pytest.fixture
async def server() -> AsyncGenerator[LightningStoreServer]:
    server = LightningStoreServer(
        InMemoryLightningStore(), port=0, token="word", max_request_bytes=1_000_000
    )
    await server.start()
    yield server
    await server.close()


def recorded(taken: AttemptedRollout, **more: str | int) -> list[ReadableSpan]:
    """Return two spans, the second the parent of the first, whose resource names the attempt."""
    ids = {semconv.ROLLOUT_ID: taken.rollout_id, semconv.ATTEMPT_ID: taken.attempt.attempt_id}
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(ids | more))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("parent"), tracer.start_as_current_span("child") as child:
        child.set_attributes({"text": "x", "n": 2**40, "share": 0.5, "yes": True, "ids": [1, 2]})
        child.add_event("happened", {"a": 1})
        child.record_exception(ValueError("wrong"))
    provider.shutdown()
    return list(kept.get_finished_spans())


async def export(server: LightningStoreServer, spans: list[ReadableSpan]) -> SpanExportResult:
    exporter = OTLPSpanExporter(
        server.otlp_traces_endpoint(),
        headers={"authorization": "Bearer word"},
        compression=Compression.Gzip,
        timeout=5,
    )
    result = await asyncio.to_thread(exporter.export, spans)
    exporter.shutdown()
    return result


def without_ids(span: Span) -> dict[str, object]:
    return span.model_dump(exclude={"sequence_id", "parent", "resource"})


async def test_what_opentelemetry_exports_is_what_it_recorded(server: LightningStoreServer):
    taken = await begin(server)
    spans = recorded(taken)
    assert await export(server, spans) is SpanExportResult.SUCCESS
    kept = await server.query_spans(taken.rollout_id)
    pair = (taken.rollout_id, taken.attempt.attempt_id)
    direct = [Span.from_opentelemetry(span, *pair, 0) for span in spans]
    assert [span.sequence_id for span in kept] == [1, 2]
    assert [without_ids(span) for span in kept] == [without_ids(span) for span in direct]
    assert kept[0].parent_id == kept[1].span_id
    assert kept[0].parent is None
    assert kept[0].resource.attributes[semconv.ROLLOUT_ID] == taken.rollout_id
    # The exporter tries again after a lost answer.
    assert await export(server, spans) is SpanExportResult.SUCCESS
    assert (await server.query_spans(taken.rollout_id)).total == 2


@pytest.mark.parametrize(("given", "kept"), [(7, 7), ("8", 8), (-3, 1), ("many", 1)])
async def test_sequence_ids_are_kept_or_given(
    server: LightningStoreServer, given: str | int, kept: int
):
    taken = await begin(server)
    spans = recorded(taken, **{semconv.SEQUENCE_ID: given})
    assert await export(server, spans[:1]) is SpanExportResult.SUCCESS
    (span,) = await server.query_spans(taken.rollout_id)
    assert span.sequence_id == kept


async def post(server: LightningStoreServer, content: bytes, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    token = {"authorization": "Bearer word"}
    async with httpx.AsyncClient(headers=token) as http:
        return await http.post(server.otlp_traces_endpoint(), content=content, headers=names)


async def test_spans_of_unknown_rollouts_do_not_stop_the_others(
    server: LightningStoreServer, caplog: pytest.LogCaptureFixture
):
    taken = await begin(server)
    known = make_span(taken, 1)
    unknown = make_span(taken, 2).model_copy(update={"rollout_id": "ro-0"})
    nobodys = make_span(taken, 3).model_copy(update={"attempt_id": ""})
    content = spans_to_otlp([unknown, known, nobodys]).SerializeToString()
    with caplog.at_level(logging.WARNING):
        answer = await post(server, content, content_type="application/x-protobuf")
    assert answer.status_code == 200
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 2
    assert "Rollout ro-0 not found" in partial.error_message
    assert "1 spans name no rollout and attempt" in caplog.text
    (kept,) = await server.query_spans(taken.rollout_id)
    assert kept.span_id == known.span_id


@pytest.mark.parametrize(
    "ids",
    [
        {"trace_id": b"\1" * 15},
        {"trace_id": b"\0" * 16},
        {"trace_id": b""},
        {"span_id": b"\1" * 16},
        {"span_id": b"\0" * 8},
        {"parent_span_id": b"\1" * 3},
    ],
)
async def test_spans_without_valid_ids_are_counted_and_left_out(
    server: LightningStoreServer, ids: dict[str, bytes]
):
    taken = await begin(server)
    known = make_span(taken, 1)
    request = spans_to_otlp([make_span(taken, 2), known])
    for name, value in ids.items():
        setattr(request.resource_spans[0].scope_spans[0].spans[0], name, value)
    answer = await post(server, request.SerializeToString(), content_type="application/x-protobuf")
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 1
    assert partial.error_message == "1 spans have ids that are not 16 and 8 bytes, or zero"
    assert [span.span_id for span in await server.query_spans(taken.rollout_id)] == [known.span_id]


async def test_all_members_of_a_gzip_body_are_read(server: LightningStoreServer):
    taken = await begin(server)
    members = [
        gzip.compress(spans_to_otlp([make_span(taken, n)]).SerializeToString()) for n in (1, 2)
    ]
    headers = PROTOBUF_GZIP
    assert (await post(server, b"".join(members), **headers)).status_code == 200
    assert (await server.query_spans(taken.rollout_id)).total == 2
    large = gzip.compress(b"\0" * 600_000)
    assert (await post(server, large + large, **headers)).status_code == 413
    assert (await post(server, members[0] + b"more", **headers)).status_code == 400
    assert (await post(server, members[0] + members[1][:-9], **headers)).status_code == 400


async def test_bad_requests_get_a_status_in_protobuf(server: LightningStoreServer):
    content = spans_to_otlp([]).SerializeToString() or b"\x0a\x00"
    for body, headers in (
        (content, {"content_type": "application/json"}),
        (content, {"content_type": "application/x-protobuf; charset=utf-8"}),
        (b"\xff\xff", {"content_type": "application/x-protobuf"}),
        (content, {"content_type": "application/x-protobuf", "content_encoding": "gzip"}),
    ):
        answer = await post(server, body, **headers)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/x-protobuf"
        status = Status.FromString(answer.content)
        assert status.code == 3
        assert status.message
    bomb = gzip.compress(b"\x00" * 5_000_000)
    large = await post(server, bomb, content_type="application/x-protobuf", content_encoding="gzip")
    assert large.status_code == 413


async def test_answers_are_compressed_where_that_is_wanted(server: LightningStoreServer):
    plain = await post(server, b"", content_type="application/x-protobuf", accept_encoding="none")
    assert "content-encoding" not in plain.headers
    assert ExportTraceServiceResponse.FromString(plain.content).partial_success.rejected_spans == 0
    small = await post(server, b"", content_type="application/x-protobuf", accept_encoding="gzip")
    assert small.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize("path", ["/v1/metrics", "/v1/logs", "/v1/development/profiles"])
async def test_other_signals_are_not_received(server: LightningStoreServer, path: str):
    async with httpx.AsyncClient(headers={"authorization": "Bearer word"}) as http:
        assert (await http.post(server.endpoint + path)).status_code == 501
