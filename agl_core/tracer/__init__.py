"""Tracers: record what an agent and its model calls did, as OpenTelemetry spans of one attempt."""

from agl_core.tracer.base import (
    AttemptTrace,
    CurrentAttempt,
    ModelCall,
    Tracer,
    get_active_tracer,
    get_current_attempt,
)
from agl_core.tracer.otel import OtelTracer

__all__ = [
    "AttemptTrace",
    "CurrentAttempt",
    "ModelCall",
    "OtelTracer",
    "Tracer",
    "get_active_tracer",
    "get_current_attempt",
]
