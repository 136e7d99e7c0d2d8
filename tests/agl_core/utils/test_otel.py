import pytest
from opentelemetry import trace as otel

from agl_core.tracer import DummyTracer, OtelTracer
from agl_core.utils.otel import get_tracer, get_tracer_provider


def test_spans_of_the_active_tracers_provider_belong_to_the_attempt():
    tracer = OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        assert get_tracer_provider() is tracer.provider
        with get_tracer().start_as_current_span("mine"):
            pass
    mine, root = trace.recorded()
    assert (mine.name, mine.parent_id) == ("mine", root.span_id)


def test_without_such_a_tracer_there_is_no_provider(monkeypatch):
    # Tests before this one may have installed a global provider, which OpenTelemetry keeps.
    monkeypatch.setattr(otel, "get_tracer_provider", otel.ProxyTracerProvider)
    with pytest.raises(RuntimeError, match="Tracer is not initialized"):
        get_tracer()
    with (
        DummyTracer().attempt("ro-1", "at-1"),
        pytest.raises(RuntimeError, match="Tracer is not initialized"),
    ):
        get_tracer()
