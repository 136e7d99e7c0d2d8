"""Operations: a function or a block of an agent as one span, with its inputs and its output."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, overload

from agl_core import semconv
from agl_core.emitter.emit import tracer_for
from agl_core.tracer.attributes import (
    flatten_attributes,
    sanitize_attributes,
    to_plain,
)
from agl_core.tracer.recording import SpanRecording
from agl_core.types.tracer import AttributeValue, SpanCoreFields

logger = logging.getLogger(__name__)

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

    Values that OpenTelemetry cannot record are recorded as JSON, else as text. What cannot be
    recorded at all is left out, with a warning (said once): the function runs all the same.

    Args:
        function: When used as a decorator without arguments.
        propagate: Whether the active tracer records it.
        attributes: Of the span; `name` is short for `agentlightning.operation.name`.

    Raises:
        TypeError: The function is a generator: its block runs on after it returned. Use
            `with operation(...)` inside of it.
        ValueError: A name is given as the first argument, or twice.
    """
    if function is not None and not callable(function):
        raise ValueError(
            "Custom span names are intentionally not supported when used as a context manager: "
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
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{_name_of(function)} is a generator, whose calls cannot be recorded; use "
                "`with operation(...)` inside of it"
            )
        signature = _signature_of(function)
        attributes = {semconv.OPERATION_NAME: _name_of(function), **self._attributes}

        def record() -> OperationContext:
            return OperationContext(attributes, propagate=self._propagate)

        if _is_async(function):

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
        self._record_inputs({**positional, **kwargs})

    def set_parameters(
        self, signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Record the arguments of a call, and the defaults of others, under the names of its
        parameters, `self` left out, those of `*args` with their number, those of `**kwargs` below
        its name; without a signature as `set_input` does.
        """
        if signature is None:
            self.set_input(*args, **kwargs)
            return
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the call itself will say what is wrong
            return
        bound.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                named[name] = _indexed(value)
            elif name not in ("self", "cls"):
                named[name] = value
        self._record_inputs(named)

    def set_output(self, output: Any) -> None:
        """Record the output."""
        self._record(semconv.OPERATION_OUTPUT, output)

    def span(self) -> SpanCoreFields:
        """Return what has been recorded so far.

        Raises:
            RuntimeError: The block was not entered.
        """
        return self._entered().get_recorded_span()

    def _record_inputs(self, named: Mapping[str, Any]) -> None:
        for name, value in named.items():
            self._record(f"{semconv.OPERATION_INPUT}.{name}", value)

    def _record(self, prefix: str, value: Any) -> None:
        recording = self._entered()
        try:
            recording.record_attributes(_to_attributes(prefix, value))
        except Exception:  # noqa: BLE001 - code of the values runs here; the agent's goes on
            _warn_not_recorded()

    def _entered(self) -> SpanRecording:
        if self._recording is None:
            raise RuntimeError(
                "Span is not ready yet, No recording context found: the "
                "operation has not begun: use `with operation(...) as op:`"
            )
        return self._recording


@functools.cache
def _warn_not_recorded() -> None:
    logger.warning("a value of an operation not recorded (said once)", exc_info=True)


def _is_async(function: AnyFunction) -> bool:
    """Say whether a function, or an object that is called, returns a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004 - its own kind is asked for
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _name_of(function: AnyFunction) -> str:
    """Return the name of a function, of what a partial calls, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _signature_of(function: AnyFunction) -> inspect.Signature | None:
    """Return a function's signature; None where it has none (some that are written in C)."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _indexed(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


def _named(attributes: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Return the attributes with `name` under its full name."""
    named = dict(attributes)
    if "name" in named:
        if semconv.OPERATION_NAME in named:
            raise ValueError(
                "Cannot specify both `name` and "
                "`additional_attributes.operation_name`: do not specify both name and "
                f"{semconv.OPERATION_NAME}"
            )
        named[semconv.OPERATION_NAME] = named.pop("name")
    recorded: dict[str, AttributeValue] = {}
    for name, value in named.items():
        recorded |= {name: value} if isinstance(value, str) else _to_attributes(name, value)
    return recorded


def _to_attributes(prefix: str, value: Any) -> dict[str, AttributeValue]:
    """Return a value as attributes; lists of primitives stay whole."""
    try:
        nested = flatten_attributes({prefix: to_plain(value)})
    except (RecursionError, ValueError):  # too deep, or names that cannot be flattened
        nested = {prefix: value}
    return sanitize_attributes(nested)
