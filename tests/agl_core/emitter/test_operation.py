import asyncio
import functools
import importlib

import pytest
from pydantic import BaseModel

from agl_core import semconv
from agl_core.emitter import emit_annotation, emit_exception, operation
from agl_core.emitter.operation import _warn_not_recorded
from agl_core.tracer import OtelTracer


class Point(BaseModel):
    x: int


@pytest.fixture
def trace():
    with OtelTracer().attempt("ro-1", "at-1") as trace:
        yield trace


def recorded(trace):
    """Return the attributes of the last operation, without their common prefix."""
    span = trace.recorded()[-1]
    assert span.name == semconv.OPERATION_SPAN
    return {k.removeprefix("agentlightning.operation."): v for k, v in span.attributes.items()}


def test_a_call_is_recorded_with_its_arguments_and_result(trace):
    @operation
    def search(query, limit=5, *more, **options):
        """Look."""
        return {"hits": [1, 2], "point": Point(x=3)}

    assert search("q", 2, "a", "b", lang="en")["hits"] == [1, 2]
    assert recorded(trace) == {
        "name": "search",
        "input.query": "q",
        "input.limit": 2,
        "input.more.0": "a",
        "input.more.1": "b",
        "input.options.lang": "en",
        "output.hits": [1, 2],
        "output.point.x": 3,
    }
    assert (search.__name__, search.__doc__) == ("search", "Look.")


async def test_an_async_call_is_the_parent_of_what_happens_in_it(trace):
    @operation(name="ask", index="wiki", scores={"a": None})
    async def ask(self):
        await asyncio.sleep(0)
        emit_annotation({"a": 1})
        return "done"

    assert await ask(object()) == "done"
    note, asked = trace.recorded()
    assert note.parent_id == asked.span_id
    assert asked.attributes["index"] == "wiki"
    assert recorded(trace)["scores.a"] == "null"
    assert recorded(trace)["name"] == "ask"
    assert "input.self" not in recorded(trace)


def test_a_block_records_what_it_is_told(trace):
    with operation(name="block") as op:
        op.set_input("q", 1, top=2)
        op.set_output(None)
        assert op.span().attributes["agentlightning.operation.input.top"] == 2
    assert recorded(trace) == {
        "name": "block",
        "input.args.0": "q",
        "input.args.1": 1,
        "input.top": 2,
        "output": "null",
    }


def test_values_that_cannot_be_recorded_become_text(trace):
    endless = []
    endless.append(endless)
    with operation(name="block") as op:
        op.set_input({1: {"a", "b"} - {"b"}}, endless=endless)
        op.set_output(endless)
    values = recorded(trace)
    assert values["output"] == "[[...]]"

    with operation(name="block") as op:
        op.set_input({1: {"a"}})
    assert recorded(trace)["input.args.0.1"] == "{'a'}"


def test_an_error_is_recorded_and_goes_on(trace):
    @operation
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        fail(1)
    first, second = trace.recorded()
    assert first.status.description == "KeyError: 'x'"
    assert second.status.status_code == "ERROR"
    assert [event.name for event in first.events] == ["exception"]


def test_calls_of_one_operation_at_once_are_spans_of_their_own(trace):
    @operation
    async def wait(number):
        await asyncio.sleep(0.01)
        return number

    async def run():
        await asyncio.gather(*[wait(number) for number in range(5)])

    asyncio.run(run())
    pairs = {
        (s.attributes[f"{semconv.OPERATION_INPUT}.number"], s.attributes[semconv.OPERATION_OUTPUT])
        for s in trace.recorded()
    }
    assert pairs == {(number, number) for number in range(5)}


def test_without_propagation_nothing_is_recorded(trace):
    with operation(name="block", propagate=False) as op:
        op.set_output(1)
    assert op.span().attributes[semconv.OPERATION_OUTPUT] == 1
    assert trace.spans() == []


def test_outside_of_an_attempt_an_operation_is_refused():
    with pytest.raises(RuntimeError, match="no active tracer"), operation(name="block"):
        pass


def test_a_name_is_given_once_and_not_as_the_spans():
    with pytest.raises(ValueError, match="specify both"):
        operation(name="a", **{semconv.OPERATION_NAME: "b"})
    with pytest.raises(ValueError, match=r"always named agentlightning\.operation"):
        operation("custom")  # pyright: ignore


def test_an_operation_that_has_not_begun_has_no_span():
    with pytest.raises(RuntimeError, match="has not begun"):
        operation(name="block").span()


class Blob(BaseModel):
    data: bytes
    size: int = 3


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no text")


class TextlessError(Exception):
    def __str__(self):
        raise AttributeError("missing")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Blob(data=b"\xff"), {"data": "b'\\xff'", "size": 3}),
        (Unspeakable(), {"": "<tests.agl_core.emitter.test_operation.Unspeakable without text>"}),
        (nested(100_000), {"": "<list without text>"}),
        ({"": 1}, {"": '{"": 1}'}),
        ({"a": {"b": 1}, "a.b": 2}, {"": '{"a": {"b": 1}, "a.b": 2}'}),
    ],
    ids=["bytes", "no text", "deep", "empty name", "names that collide"],
)
def test_no_value_keeps_a_function_from_running(trace, value, expected):
    @operation
    def same(given):
        return given

    assert same(value) is value
    found = recorded(trace)
    for name, text in expected.items():
        assert found[f"input.given.{name}".rstrip(".")] == text
        assert found[f"output.{name}".rstrip(".")] == text


def test_what_cannot_be_recorded_at_all_is_left_out_with_a_warning(trace, caplog, monkeypatch):
    def broken(value):
        raise RuntimeError("broken")

    _warn_not_recorded.cache_clear()
    module = importlib.import_module("agl_core.emitter.operation")
    monkeypatch.setattr(module, "to_plain", broken)

    @operation
    def double(number):
        return 2 * number

    assert [double(1), double(2)] == [2, 4]
    assert recorded(trace) == {"name": "double"}
    assert caplog.text.count("value of an operation not recorded") == 1


def test_an_error_without_text_goes_on(trace):
    @operation
    def fail():
        raise TextlessError

    with pytest.raises(TextlessError):
        fail()
    (span,) = trace.recorded()
    assert span.status.description.startswith("TextlessError: <")
    emitted = emit_exception(TextlessError())
    assert emitted.attributes[semconv.EXCEPTION_TYPE].endswith("TextlessError")


def test_partials_and_objects_that_are_called_can_be_operations(trace):
    class Greeter:
        def __call__(self, name):
            return f"hi {name}"

    class AsyncGreeter:
        async def __call__(self, name):
            await asyncio.sleep(0)
            return f"hi {name}"

    def greet(greeting, name):
        return f"{greeting} {name}"

    async def run():
        assert await operation(AsyncGreeter())("b") == "hi b"

    assert operation(functools.partial(greet, "hi"))("b") == "hi b"
    assert recorded(trace) == {"name": "greet", "input.name": "b", "output": "hi b"}
    assert operation(Greeter())("b") == "hi b"
    assert recorded(trace)["name"] == "Greeter"
    asyncio.run(run())
    assert recorded(trace)["name"] == "AsyncGreeter"
    assert recorded(trace)["output"] == "hi b"


def test_a_generator_is_refused():
    def count():
        yield 1

    async def count_async():
        yield 1

    for function in (count, count_async):
        with pytest.raises(TypeError, match=f"{function.__name__} is a generator"):
            operation(function)
