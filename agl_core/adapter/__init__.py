"""Recorded spans to training triplets and chats: pure functions.

`columns` is the pipeline's way, over tables of many attempts. The adapters take the spans of one
attempt, from any tracer: `span_tree` and `hierarchy` find which agent made a call, `llm_call` and
`chat` read it whatever recorded it, `calls` makes one call of its spans, `rewards` gives each
reward its call.
"""

from agl_core.adapter.base import Adapter, OtelTraceAdapter, TraceAdapter, TraceToTripletBase
from agl_core.adapter.messages import OpenAIMessages, TraceToMessages
from agl_core.adapter.triplet import (
    AdaptResult,
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceTree,
    TripletReport,
)

__all__ = [
    "AdaptResult",
    "Adapter",
    "LlmProxyTraceToTriplet",
    "OpenAIMessages",
    "OtelTraceAdapter",
    "RewardMatchPolicy",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "TraceTree",
    "TracerTraceToTriplet",
    "TripletReport",
]
