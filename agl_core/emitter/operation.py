"""Operations: a function or a block of an agent as one span, with its inputs and its output."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, overload

from agl_core import semconv
from agl_core.emitter.emit import tracer_for
from agl_core.tracer.attributes import (
    flatten_attributes,
    sanitize_attribute_values,
    to_plain,
)
from agl_core.tracer.recording import SpanRecording
from agl_core.types.tracer import AttributeValue, SpanCoreFields

AnyFunction = Callable[..., Any]


@overload
def operation(function: AnyFunction, /) -> AnyFunction: ...
@overload
def operation(*, propagate: bool = True, **attributes: Any) -> "OperationContext": ...
def operation(
    function: Any = None, /, *, propagate: bool = True, **attributes: Any
) -> "AnyFunction | OperationContext":
    """Record a function's calls, or a block, as spans named `agentlightning.operation`.

        @operation
        @operation(name="search", index="wiki")
        with operation(name="search") as op:
            op.set_input(query); op.set_output(hits)

    Values that OpenTelemetry cannot record are recorded as JSON, else as text.

    Args:
        function: When used as a decorator without arguments.
        propagate: Whether the active tracer records it.
        attributes: Of the span; `name` is short for `agentlightning.operation.name`.

    Raises:
        ValueError: A name is given as the first argument, or twice.
    """
    if function is not None and not callable(function):
        raise ValueError(
            f"the span of an operation is always named {semconv.OPERATION_SPAN}; "
            f"write operation(name={function!r})"
        )
    context = OperationContext(attributes, propagate=propagate)
    return context if function is None else context(function)


class OperationContext:
    """What `operation(...)` returns: a decorator, and a context manager for one block."""

    def __init__(self, attributes: Mapping[str, Any], *, propagate: bool) -> None:
        self._attributes = _named(attributes)
        self._propagate = propagate
        self._context: AbstractContextManager[SpanRecording] | None = None
        self._recording: SpanRecording | None = None

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Return the function with its calls recorded."""
        signature = inspect.signature(function)
        attributes = {semconv.OPERATION_NAME: function.__name__, **self._attributes}

        def record() -> OperationContext:
            return OperationContext(attributes, propagate=self._propagate)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with record() as op:
                    op.set_parameters(signature, args, kwargs)
                    output = await function(*args, **kwargs)
                    op.set_output(output)
                    return output

            return call_async

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with record() as op:
                op.set_parameters(signature, args, kwargs)
                output = function(*args, **kwargs)
                op.set_output(output)
                return output

        return call

    def __enter__(self) -> Self:
        tracer = tracer_for(self._propagate)
        self._context = tracer.operation_context(semconv.OPERATION_SPAN, self._attributes)
        self._recording = self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._context is not None, "entered before"
        self._context.__exit__(kind, error, traceback)

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record inputs: positional ones under `args.<i>`, the others under their names."""
        positional = {"args": _indexed(args)} if args else {}
        self._record(semconv.OPERATION_INPUT, {**positional, **kwargs})

    def set_parameters(
        self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Record the arguments of a call under the names of its parameters, `self` left out, those
        of `*args` with their number.
        """
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the call itself will say what is wrong
            return
        named: dict[str, Any] = {}
        for name, value in bound.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                named[name] = _indexed(value)
            elif name not in ("self", "cls"):
                named[name] = value
        self._record(semconv.OPERATION_INPUT, named)

    def set_output(self, output: Any) -> None:
        """Record the output."""
        self._record(semconv.OPERATION_OUTPUT, output)

    def span(self) -> SpanCoreFields:
        """Return what has been recorded so far.

        Raises:
            RuntimeError: The block was not entered.
        """
        return self._entered().get_recorded_span()

    def _record(self, prefix: str, value: Any) -> None:
        self._entered().record_attributes(_to_attributes(prefix, value))

    def _entered(self) -> SpanRecording:
        if self._recording is None:
            raise RuntimeError("the operation has not begun: use `with operation(...) as op:`")
        return self._recording


def _indexed(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


def _named(attributes: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Return the attributes with `name` under its full name."""
    named = dict(attributes)
    if "name" in named:
        if semconv.OPERATION_NAME in named:
            raise ValueError(f"do not specify both name and {semconv.OPERATION_NAME}")
        named[semconv.OPERATION_NAME] = named.pop("name")
    return sanitize_attribute_values(named)


def _to_attributes(prefix: str, value: Any) -> dict[str, AttributeValue]:
    """Return a value as attributes; lists of primitives stay whole."""
    try:
        nested = flatten_attributes({prefix: to_plain(value)}, expand_leaf_lists=False)
    except RecursionError:  # it contains itself
        nested = {prefix: str(value)}
    return sanitize_attribute_values(nested)
