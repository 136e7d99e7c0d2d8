"""Where the store's server receives OTLP/HTTP: traces become spans, the other signals are refused.

Spans that the store does not take, that belong to no attempt or have no valid ids are counted in
the answer's `partial_success`; they do not stop those that came with them.
"""

import asyncio
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
from agl_core.store.refusals import answer_to
from agl_core.store.wire import TRACES_PATH
from agl_core.tracer.otlp import UNNUMBERED, ReceivedSpans, spans_from_otlp
from agl_core.tracer.otlp_limits import check_limits
from agl_core.types.tracer import Span
from agl_core.utils.request_body import BodyRefused, off_loop, read_body

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
_MOST_REASONS = 10
"""Told and logged of one request."""
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
            received = await off_loop(body, _parse)
        except BodyRefused as error:
            # OTLP knows 400 for everything that must not be sent again.
            status = error.status if error.status in (408, 413) else 400
            return _answer(request, Status(code=_INVALID_ARGUMENT, message=str(error)), status)
        try:
            return _answer(request, await _receive(store, received))
        except Exception as error:  # noqa: BLE001 - each becomes an answer here
            return answer_to(error, "OTLP traces")

    async def not_received(request: Request) -> Response:
        return JSONResponse({"detail": f"{request.url.path} is not received here"}, 501)

    others = [Route(path, not_received, methods=["POST"]) for path in _OTHER_SIGNALS]
    return [Route(TRACES_PATH, traces, methods=["POST"]), *others]


def _parse(body: bytes) -> ReceivedSpans:
    """Return the spans of a request that is within the limits."""
    try:
        check_limits(body)
    except ValueError as error:
        raise BodyRefused(413, str(error)) from error
    try:
        return spans_from_otlp(ExportTraceServiceRequest.FromString(body))
    except (DecodeError, RecursionError, ValueError) as error:
        raise BodyRefused(400, f"the request is not OTLP: {error}") from error


async def _receive(store: LightningStore, received: ReceivedSpans) -> ExportTraceServiceResponse:
    """Keep the spans of a request and say how many could not be kept."""
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
                reasons.append(f"{error!s:.500}")
            await asyncio.sleep(0)  # other requests have their turn
    if len(reasons) > _MOST_REASONS:
        reasons[_MOST_REASONS:] = [f"and {len(reasons) - _MOST_REASONS} more reasons"]
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
