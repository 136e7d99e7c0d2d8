"""Where the store's server receives OTLP/HTTP: traces become spans, the other signals are refused.

Spans that the store does not take, that belong to no attempt or have no valid ids are counted in
the answer's `partial_success`; they do not stop those that came with them.
"""

import gzip
import logging
from collections import defaultdict
from collections.abc import Sequence

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agl_core.store.base import LightningStore
from agl_core.store.refusals import Refusal, answer_to
from agl_core.store.request_body import read_body
from agl_core.store.wire import TRACES_PATH
from agl_core.tracer.otlp import UNNUMBERED, spans_from_otlp
from agl_core.types.tracer import Span

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
_OTHER_SIGNALS = ("/v1/metrics", "/v1/logs", "/v1/development/profiles")
_INVALID_ARGUMENT = 3
"""Of google.rpc.Code."""


def routes(store: LightningStore, max_request_bytes: int) -> list[Route]:
    """Return the routes of OTLP/HTTP.

    Args:
        store: Gets the spans.
        max_request_bytes: Limit of a request, also when it is decompressed.
    """

    async def traces(request: Request) -> Response:
        try:
            body = await read_body(request, max_request_bytes, PROTOBUF, parameters=False)
            export = ExportTraceServiceRequest.FromString(body)
        except (Refusal, DecodeError) as error:
            status = error.status if isinstance(error, Refusal) else 400
            # OTLP knows 400 for everything that must not be sent again.
            status = 413 if status == 413 else 400
            return _answer(request, Status(code=_INVALID_ARGUMENT, message=str(error)), status)
        try:
            return _answer(request, await _receive(store, export))
        except Exception as error:  # noqa: BLE001 - each becomes an answer here
            return answer_to(error, "OTLP traces")

    async def not_received(request: Request) -> Response:
        return JSONResponse({"detail": f"{request.url.path} is not received here"}, 501)

    others = [Route(path, not_received, methods=["POST"]) for path in _OTHER_SIGNALS]
    return [Route(TRACES_PATH, traces, methods=["POST"]), *others]


async def _receive(
    store: LightningStore, export: ExportTraceServiceRequest
) -> ExportTraceServiceResponse:
    """Keep the spans of a request and say how many could not be kept."""
    received = spans_from_otlp(export)
    left_out = {
        "name no rollout and attempt": received.num_without_attempt,
        "have ids that are not 16 and 8 bytes, or zero": received.num_without_ids,
    }
    refused = sum(left_out.values())
    reasons = [f"{count} spans {reason}" for reason, count in left_out.items() if count]
    by_attempt: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in received.spans:
        by_attempt[span.rollout_id, span.attempt_id].append(span)
    try:
        await _keep(store, received.spans)
    except ValueError:  # one attempt is unknown: find out which, and keep the others'
        for spans in by_attempt.values():
            try:
                await _keep(store, spans)
            except ValueError as error:
                refused += len(spans)
                reasons.append(str(error))
    answer = ExportTraceServiceResponse()
    if refused:
        logger.warning("spans were not kept: count=%d: %s", refused, "; ".join(reasons))
        answer.partial_success.rejected_spans = refused
        answer.partial_success.error_message = "; ".join(reasons)
    return answer


async def _keep(store: LightningStore, spans: Sequence[Span]) -> None:
    """Number those that have no number, and keep all."""
    unnumbered = [span for span in spans if span.sequence_id == UNNUMBERED]
    if unnumbered:
        ids = await store.get_many_span_sequence_ids(
            [(span.rollout_id, span.attempt_id) for span in unnumbered]
        )
        for span, sequence_id in zip(unnumbered, ids, strict=True):
            span.sequence_id = sequence_id
    if spans:
        await store.add_many_spans(spans)


def _answer(request: Request, message: Message, status: int = 200) -> Response:
    body = message.SerializeToString()
    headers = {}
    if "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers, PROTOBUF)
