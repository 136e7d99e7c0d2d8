import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from agl_core import semconv
from agl_core.emitter.annotation import emit_annotation
from agl_core.ledger.spans import numeric_annotations, spans_to_table
from agl_core.tracer.otel import OtelTracer


def record(emit: Callable[[OtelTracer], object]) -> list[ReadableSpan]:
    tracer = OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        emit(tracer)
    return trace.spans()


@pytest.mark.parametrize(
    ("attribute", "column", "value"),
    [
        (semconv.REQUEST_TEMPERATURE, "temperature", "hot"),
        (semconv.REQUEST_TEMPERATURE, "temperature", [0.5]),
        (semconv.REQUEST_MODEL, "model", 5),
        (semconv.PRIMARY_REWARD_VALUE, "reward", "high"),
        (semconv.CALL_INDEX, "call_index", 2**40),
    ],
)
def test_a_value_that_its_column_cannot_take_is_kept_beside_it(
    attribute: str, column: str, value: Any
):
    spans = record(lambda tracer: tracer.create_span("x", {attribute: value}))
    row = spans_to_table([(7, spans)]).to_pylist()[0]
    assert (row["index"], row[column]) == (7, None)
    assert json.loads(row["attributes"])[attribute] == value


@pytest.mark.parametrize(
    ("reasons", "first"), [(["stop", "length"], "stop"), ("stop", "stop"), ([0], None), ([], None)]
)
def test_a_finish_reason_is_the_first_text_whatever_was_recorded(reasons: Any, first: str | None):
    spans = record(lambda tracer: tracer.create_span("x", {semconv.FINISH_REASONS: reasons}))
    row = spans_to_table([(0, spans)]).to_pylist()[0]
    assert row["finish_reason"] == first
    assert (semconv.FINISH_REASONS in json.loads(row["attributes"])) == (first is None)


def test_a_number_without_a_mean_is_no_annotation():
    notes = {"nan": float("nan"), "inf": float("inf"), "huge": 10**400, "good": True, "n": 2}
    spans = record(lambda tracer: emit_annotation(notes))
    assert numeric_annotations(spans) == {"good": 1.0, "n": 2.0}
    assert spans_to_table([(0, spans)]).num_rows == 2
