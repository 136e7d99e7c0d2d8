import pytest

from agl_core import semconv
from agl_core.emitter import emit_annotation
from agl_core.tracer import OtelTracer


def test_nested_annotation_is_flattened_with_dots():
    with OtelTracer().attempt("ro-1", "at-1") as trace:
        emit_annotation({"a": {"b": [1, "x"], "c": True}, "d": 0.5})
    span = trace.spans()[0]
    assert span.name == semconv.ANNOTATION_SPAN
    recorded = {k: v for k, v in span.attributes.items() if not k.startswith("agentlightning.")}
    assert recorded == {"a.b.0": 1, "a.b.1": "x", "a.c": True, "d": 0.5}


def test_annotation_outside_of_an_attempt_is_refused():
    with pytest.raises(RuntimeError, match="no active tracer"):
        emit_annotation({"a": 1})


@pytest.mark.parametrize("annotation", [{"a": {"b": None}}, {"a": [object()]}, {1: "x"}])
def test_what_cannot_be_recorded_is_refused(annotation):
    with OtelTracer().attempt("ro-1", "at-1"), pytest.raises(ValueError, match="attribute"):
        emit_annotation(annotation)


def test_names_that_flattening_would_lose_are_refused():
    for annotation in ({"": 1}, {"a": {"": 1}}):
        with pytest.raises(ValueError, match="is empty"):
            emit_annotation(annotation, propagate=False)
    with pytest.raises(ValueError, match=r"two values have the attribute name 'a\.b'"):
        emit_annotation({"a": {"b": 1}, "a.b": 2}, propagate=False)


def test_an_annotation_that_is_nested_too_deeply_is_refused():
    value = {}
    for _ in range(10_000):
        value = {"a": value}
    with pytest.raises(ValueError, match="nested too deeply"):
        emit_annotation(value, propagate=False)
