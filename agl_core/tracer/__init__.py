"""Tracers: record what an agent and its model calls did, as OpenTelemetry spans of one attempt."""

from agl_core.tracer.agentops import AgentOpsTracer
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.base import ModelCall, Tracer
from agl_core.tracer.current import (
    CurrentAttempt,
    clear_active_tracer,
    get_active_tracer,
    get_current_attempt,
    set_active_tracer,
)
from agl_core.tracer.dummy import DummyTracer
from agl_core.tracer.otel import OtelTracer

__all__ = [
    "AgentOpsTracer",
    "AttemptTrace",
    "CurrentAttempt",
    "DummyTracer",
    "ModelCall",
    "OtelTracer",
    "Tracer",
    "clear_active_tracer",
    "get_active_tracer",
    "get_current_attempt",
    "set_active_tracer",
]
