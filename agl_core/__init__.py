"""Agents, traces, rewards and learning: the library of the pipeline, without Prefect.

The names below are imported when they are first used, so `import agl_core` is quick and loads none
of torch, verl, ray, transformers or prefect.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_core.adapter.base import Adapter, OtelTraceAdapter, TraceAdapter, TraceToTripletBase
    from agl_core.adapter.messages import TraceToMessages
    from agl_core.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet
    from agl_core.algorithm.base import IterativeAlgorithm
    from agl_core.algorithm.verl.algorithm import VERL
    from agl_core.config import RunConfig
    from agl_core.emitter.annotation import emit_annotation
    from agl_core.emitter.reward import emit_reward, find_final_reward
    from agl_core.litagent.decorator import llm_rollout, prompt_rollout, rollout
    from agl_core.tracer.base import Tracer
    from agl_core.tracer.otel import OtelTracer
    from agl_core.types.core import Attempt, AttemptedRollout, Rollout, RolloutConfig
    from agl_core.types.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, Resource

_HOMES = {
    "LLM": "types.resources",
    "VERL": "algorithm.verl.algorithm",
    "Adapter": "adapter.base",
    "Attempt": "types.core",
    "AttemptedRollout": "types.core",
    "IterativeAlgorithm": "algorithm.base",
    "LlmProxyTraceToTriplet": "adapter.triplet",
    "NamedResources": "types.resources",
    "OtelTraceAdapter": "adapter.base",
    "OtelTracer": "tracer.otel",
    "PromptTemplate": "types.resources",
    "ProxyLLM": "types.resources",
    "Resource": "types.resources",
    "Rollout": "types.core",
    "RolloutConfig": "types.core",
    "RunConfig": "config",
    "TraceAdapter": "adapter.base",
    "TraceToMessages": "adapter.messages",
    "TraceToTripletBase": "adapter.base",
    "Tracer": "tracer.base",
    "TracerTraceToTriplet": "adapter.triplet",
    "emit_annotation": "emitter.annotation",
    "emit_reward": "emitter.reward",
    "find_final_reward": "emitter.reward",
    "llm_rollout": "litagent.decorator",
    "prompt_rollout": "litagent.decorator",
    "rollout": "litagent.decorator",
}

__all__ = [
    "LLM",
    "VERL",
    "Adapter",
    "Attempt",
    "AttemptedRollout",
    "IterativeAlgorithm",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "OtelTraceAdapter",
    "OtelTracer",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "Rollout",
    "RolloutConfig",
    "RunConfig",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "Tracer",
    "TracerTraceToTriplet",
    "emit_annotation",
    "emit_reward",
    "find_final_reward",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
