"""OpenTelemetry's global provider, for code that knows nothing of tracers of ours.

What an agent or an instrumentation records by `opentelemetry.trace.get_tracer(...)` goes to the
tracer of the attempt that the code runs in, and nowhere outside of attempts. A provider that
somebody installed before is left alone: its spans are then theirs.
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from opentelemetry import trace as otel
from opentelemetry.util._decorator import _agnosticcontextmanager

from agl_core.tracer.current import get_current_attempt


@runtime_checkable
class HasProvider(Protocol):
    """A tracer that records by OpenTelemetry."""

    provider: otel.TracerProvider


def install_routing_provider() -> bool:
    """Install the global provider that routes by attempt, once; False if there is another one."""
    installed = otel.get_tracer_provider()
    if isinstance(installed, otel.ProxyTracerProvider):
        otel.set_tracer_provider(_RoutingProvider())
        return True
    return isinstance(installed, _RoutingProvider)


class _RoutingProvider(otel.TracerProvider):
    def get_tracer(self, *args: Any, **kwargs: Any) -> otel.Tracer:
        return _RoutingTracer(args, kwargs)


class _RoutingTracer(otel.Tracer):
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs

    def start_span(self, *args: Any, **kwargs: Any) -> otel.Span:
        return self._target().start_span(*args, **kwargs)

    @_agnosticcontextmanager
    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Iterator[otel.Span]:
        with self._target().start_as_current_span(*args, **kwargs) as span:
            yield span

    def _target(self) -> otel.Tracer:
        current = get_current_attempt()
        if current is None or not isinstance(current.tracer, HasProvider):
            return otel.NoOpTracer()
        return current.tracer.provider.get_tracer(*self._args, **self._kwargs)
