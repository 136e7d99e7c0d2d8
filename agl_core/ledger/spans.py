"""OpenTelemetry spans to the `SPANS` table and back: promoted columns, and the other attributes as
JSON.
"""

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode

from agl_core import semconv
from agl_core.ledger.tables import SPANS
from agl_core.types.tracer import OtelResource, Span, TraceStatus

_PROMOTED = {
    "sequence_id": semconv.SEQUENCE_ID,
    "operation": semconv.OPERATION,
    "model": semconv.REQUEST_MODEL,
    "policy_version": semconv.POLICY_VERSION,
    "weights_digest": semconv.WEIGHTS_DIGEST,
    "call_index": semconv.CALL_INDEX,
    "temperature": semconv.REQUEST_TEMPERATURE,
    "sampling": semconv.SAMPLING,
    "max_tokens": semconv.REQUEST_MAX_TOKENS,
    "response_id": semconv.RESPONSE_ID,
    "input_tokens": semconv.INPUT_TOKENS,
    "output_tokens": semconv.OUTPUT_TOKENS,
    "reward": semconv.PRIMARY_REWARD_VALUE,
    "prompt_token_ids": semconv.PROMPT_TOKEN_IDS,
    "response_token_ids": semconv.RESPONSE_TOKEN_IDS,
    "logprobs": semconv.LOGPROBS,
    "rollout_id": semconv.ROLLOUT_ID,
    "attempt_id": semconv.ATTEMPT_ID,
}
TOKEN_COLUMNS = ["prompt_token_ids", "response_token_ids", "logprobs"]
"""Where most of the bytes are."""
_SPAN_COLUMNS = (
    *("rollout_id", "attempt_id", "sequence_id", "trace_id", "span_id", "parent_id"),
    *("name", "status", "start_time", "end_time"),
)
_NO_RESOURCE = OtelResource()
_TYPES = {name: SPANS.field(name).type for name in _PROMOTED}
_BY_ATTRIBUTE = {attribute: column for column, attribute in _PROMOTED.items()}


def spans_to_table(attempts: Iterable[tuple[int, Sequence[ReadableSpan]]]) -> pa.Table:
    """Return the spans of some attempts as one table (schema `SPANS`).

    An agent decides what some attributes hold: a value that its column cannot take stays among the
    other attributes, and the column is null.

    Args:
        attempts: Of each, its rollout's place among the requests, and its finished spans with the
            ids of rollout and attempt among their attributes.
    """
    indices: list[int] = []
    spans: list[ReadableSpan] = []
    for index, ended in attempts:
        indices += [index] * len(ended)
        spans += ended
    attributes = [dict(span.attributes or {}) for span in spans]
    columns: dict[str, Any] = {
        column: _promote(column, attribute, attributes)
        for attribute, column in _BY_ATTRIBUTE.items()
    }
    columns |= {
        "index": indices,
        "finish_reason": [_take_finish_reason(found) for found in attributes],
        "attributes": [json.dumps(a, sort_keys=True, default=str) for a in attributes],
        **_own_columns(spans),
    }
    return pa.table({name: columns[name] for name in SPANS.names}, schema=SPANS)


def _promote(column: str, attribute: str, attributes: list[dict[str, Any]]) -> pa.Array:
    """Take an attribute out of each span's, where its column can hold the value."""
    values = [found.get(attribute) for found in attributes]
    try:
        array = pa.array(values, _TYPES[column])
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        values = [value if _fits(column, value) else None for value in values]
        array = pa.array(values, _TYPES[column])
    for found, value in zip(attributes, values, strict=True):
        if value is not None:
            del found[attribute]
    return array


def _take_finish_reason(found: dict[str, Any]) -> str | None:
    """Take a span's first finish reason out of its attributes, where it is a text."""
    reasons = found.get(semconv.FINISH_REASONS)
    texts = [reasons] if isinstance(reasons, str) else reasons
    if not isinstance(texts, list | tuple) or not texts or not isinstance(texts[0], str):
        return None
    del found[semconv.FINISH_REASONS]
    return texts[0]


def _own_columns(spans: Sequence[ReadableSpan]) -> dict[str, list[Any]]:
    """Return the columns of what every span has."""
    contexts = [span.get_span_context() for span in spans]
    statuses = [span.status for span in spans]
    return {
        # A finished span has a context.
        "trace_id": [context.trace_id.to_bytes(16, "big") for context in contexts if context],
        "span_id": [context.span_id.to_bytes(8, "big") for context in contexts if context],
        "parent_id": [
            span.parent.span_id.to_bytes(8, "big") if span.parent else None for span in spans
        ],
        "name": [span.name for span in spans],
        "status": [status.status_code.name for status in statuses],
        "status_description": [status.description for status in statuses],
        "start_time": [(span.start_time or 0) / 1e9 for span in spans],
        "end_time": [(span.end_time or 0) / 1e9 for span in spans],
        "events": [_events_json(span) for span in spans],
    }


def _events_json(span: ReadableSpan) -> str:
    events = span.events
    return json.dumps([_event(event) for event in events], default=str) if events else "[]"


def read_spans(table: pa.Table, *, with_attributes: bool) -> list[Span]:
    """Return rows of a table of spans as spans, without token ids, log-probs and events.

    Args:
        table: Schema `SPANS`.
        with_attributes: Whether to read the attributes, which takes most of the time.
    """
    ids = {"rollout_id", "attempt_id", "sequence_id"}
    promoted = {name: _PROMOTED[name] for name in _PROMOTED if name not in TOKEN_COLUMNS}
    columns = [*_SPAN_COLUMNS, *(promoted.keys() - ids if with_attributes else ())]
    columns += ["attributes"] if with_attributes else []
    columns = [name for name in columns if name in table.column_names]
    return [_read_span(row, promoted) for row in table.select(columns).to_pylist()]


def _read_span(row: dict[str, Any], promoted: dict[str, str]) -> Span:
    attributes = json.loads(row.get("attributes") or "{}")
    attributes |= {
        attribute: row[column]
        for column, attribute in promoted.items()
        if row.get(column) is not None
    }
    return Span.model_construct(
        rollout_id=row["rollout_id"],
        attempt_id=row["attempt_id"],
        sequence_id=row["sequence_id"] or 0,
        trace_id=(row["trace_id"] or b"").hex(),
        span_id=(row["span_id"] or b"").hex(),
        parent_id=row["parent_id"].hex() if row["parent_id"] else None,
        name=row["name"],
        status=_status(row["status"] or "UNSET"),
        attributes=attributes,
        events=[],  # a default that has to be made takes most of a span's time
        links=[],
        start_time=row["start_time"],
        end_time=row["end_time"],
        context=None,
        parent=None,
        resource=_NO_RESOURCE,
    )


@cache
def _status(code: Any) -> TraceStatus:
    return TraceStatus(status_code=code)


def _fits(column: str, value: Any) -> bool:
    """Say whether a column can hold an attribute's value."""
    if value is None:
        return False
    try:
        pa.scalar(value, _TYPES[column])
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return False
    return True


def as_recorded(span: Span, rollout_id: str) -> ReadableSpan:
    """Return a store's span as the tracer recorded it, for `spans_to_table`.

    Args:
        span: Of an attempt.
        rollout_id: What the ledger calls its rollout.
    """
    trace_id = int(span.trace_id, 16)
    ids = {
        semconv.ROLLOUT_ID: rollout_id,
        semconv.ATTEMPT_ID: span.attempt_id,
        semconv.SEQUENCE_ID: span.sequence_id,
    }
    return ReadableSpan(
        name=span.name,
        context=_context(trace_id, span.span_id),
        parent=_context(trace_id, span.parent_id) if span.parent_id else None,
        attributes={**span.attributes, **ids},
        events=[
            Event(event.name, event.attributes, int((event.timestamp or 0.0) * 1e9))
            for event in span.events
        ],
        status=Status(
            StatusCode[span.status.status_code],
            # OpenTelemetry has a description for errors alone.
            span.status.description if span.status.status_code == "ERROR" else None,
        ),
        start_time=int((span.start_time or 0.0) * 1e9),
        end_time=int((span.end_time or 0.0) * 1e9),
    )


def _context(trace_id: int, span_id: str) -> SpanContext:
    return SpanContext(trace_id, int(span_id, 16), is_remote=False)


def _event(event: Any) -> dict[str, Any]:
    return {
        "name": event.name,
        "time": event.timestamp / 1e9,
        "attributes": dict(event.attributes or {}),
    }


def numeric_annotations(spans: Sequence[ReadableSpan]) -> dict[str, float]:
    """Return the finite numbers and booleans that an agent noted with `emit_annotation`; the last
    one of a name wins. There is no mean over a NaN, and JSON has none.
    """
    found: dict[str, float] = {}
    for span in spans:
        if span.name != semconv.ANNOTATION_SPAN:
            continue
        for name, value in (span.attributes or {}).items():
            if name.startswith("agentlightning.") or not isinstance(value, bool | int | float):
                continue
            if (number := _as_float(value)) is not None:
                found[name] = number
    return found


def _as_float(value: float) -> float | None:
    """Return a finite number as a float, None for any other."""
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the floats
        return None
    return number if math.isfinite(number) else None
