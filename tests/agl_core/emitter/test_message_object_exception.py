from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import semconv
from agl_core.emitter import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    get_message_value,
    get_object_value,
)
from agl_core.tracer import OtelTracer

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=10,
)


def span_with(**attributes):
    names = {"type": semconv.OBJECT_TYPE, "literal": semconv.OBJECT_LITERAL}
    names |= {"json": semconv.OBJECT_JSON, "body": semconv.MESSAGE_BODY}
    return SimpleNamespace(name="s", attributes={names[k]: v for k, v in attributes.items()})


def test_what_is_emitted_is_recorded_and_returned():
    with OtelTracer().attempt("ro-1", "at-1") as trace:
        emitted = [
            emit_message("hello", {"n": 1}),
            emit_object({"a": [1]}, {"n": 2}),
            emit_exception(KeyError("x"), {"n": 3}),
        ]
    recorded = trace.recorded()[:-1]
    assert [(s.name, s.attributes, s.status) for s in recorded] == [
        (s.name, s.attributes, s.status) for s in emitted
    ]
    names = [semconv.MESSAGE_SPAN, semconv.OBJECT_SPAN, semconv.EXCEPTION_SPAN]
    assert [span.name for span in recorded] == names
    assert [span.attributes["n"] for span in recorded] == [1, 2, 3]
    assert [span.status.status_code for span in recorded] == ["UNSET", "UNSET", "ERROR"]
    assert recorded[2].attributes["exception.type"] == "KeyError"


@pytest.mark.parametrize(
    "emit",
    [
        lambda: emit_annotation({"a": 1}, propagate=False),
        lambda: emit_message("x", propagate=False),
        lambda: emit_object(1, propagate=False),
        lambda: emit_exception(KeyError("x"), propagate=False),
        lambda: emit_reward(1.0, propagate=False),
    ],
)
def test_without_propagation_a_span_is_only_returned(emit):
    assert emit().attributes
    with OtelTracer().attempt("ro-1", "at-1") as trace:
        assert emit().attributes
    assert len(trace.spans()) == 1


@pytest.mark.parametrize(
    "emit", [lambda: emit_message("x"), lambda: emit_object(1), lambda: emit_exception(KeyError())]
)
def test_outside_of_an_attempt_emitting_is_refused(emit):
    with pytest.raises(RuntimeError, match="no active tracer"):
        emit()


@given(json_values | st.binary())
def test_an_object_comes_back(value):
    again = get_object_value(emit_object(value, propagate=False))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("value", [object(), {1, 2}, {"a": b"x"}, lambda: 1])
def test_an_object_that_json_cannot_express_is_refused(value):
    with pytest.raises(RuntimeError, match="Object must be JSON serializable"):
        emit_object(value, propagate=False)


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (span_with(json="{"), "not JSON"),
        (span_with(json=1), "not JSON"),
        (span_with(literal="x"), "Unsupported object type for literal deserialization: None"),
        (span_with(literal="x", type="complex"), "literal deserialization: 'complex'"),
        (span_with(literal="x", type="int"), "is no int: 'x'"),
        (span_with(literal="yes", type="bool"), "is no bool"),
        (span_with(literal="*", type="bytes"), "is no bytes"),
    ],
)
def test_a_broken_object_is_refused(span, reason):
    with pytest.raises(RuntimeError, match=reason):
        get_object_value(span)


@pytest.mark.parametrize(
    ("literal", "value"), [("true", True), ("True", True), ("false", False), ("False", False)]
)
def test_a_truth_value_may_be_written_in_lower_case(literal, value):
    """As producers in other languages do."""
    assert get_object_value(span_with(literal=literal, type="bool")) is value


def test_a_span_without_them_has_no_message_and_no_object():
    for span in (span_with(), SimpleNamespace(name="s", attributes=None)):
        assert get_message_value(span) is None
        assert get_object_value(span) is None


def test_a_message_comes_back():
    assert get_message_value(emit_message("hello", propagate=False)) == "hello"
    with pytest.raises(TypeError, match="Message must be a string or list of strings, got: int"):
        get_message_value(span_with(body=1))


def test_what_is_no_message_and_no_exception_is_refused():
    with pytest.raises(TypeError, match="Message must be a string, got: int"):
        emit_message(1)  # pyright: ignore
    with pytest.raises(TypeError, match="Expected a BaseException instance, got: str"):
        emit_exception("x")  # pyright: ignore


def test_attributes_that_a_span_cannot_record_are_refused():
    with pytest.raises(ValueError, match="attribute 'a' is a object"):
        emit_message("x", {"a": object()}, propagate=False)


def test_emitted_spans_are_logged_on_request(monkeypatch, caplog):
    caplog.set_level("INFO", "agl_core.emitter.emit")
    emit_annotation({"a": 1}, propagate=False)
    monkeypatch.setenv("AGL_EMITTER_DEBUG", "1")
    emit_annotation({"b": 2}, propagate=False)
    assert [r.getMessage() for r in caplog.records] == [
        "emitted agentlightning.annotation: {'b': 2}"
    ]


def test_a_kind_of_bytes_comes_back_as_bytes():
    class Kind(bytes):
        pass

    assert get_object_value(emit_object(Kind(b"x"), propagate=False)) == b"x"


def test_an_object_beyond_text_is_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    for beyond in (10**5000, value):
        with pytest.raises(RuntimeError):
            emit_object(beyond, propagate=False)
