"""Agents, traces, rewards and learning: the library of the pipeline, without Prefect.

The names below are imported when they are first used, so `import agl_core` is quick and loads none
of torch, verl, ray, transformers or prefect.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_core.algorithm.base import IterativeAlgorithm
    from agl_core.algorithm.verl.algorithm import VERL
    from agl_core.config import RunConfig
    from agl_core.emitter.annotation import emit_annotation
    from agl_core.emitter.exception import emit_exception
    from agl_core.emitter.message import emit_message, get_message_value
    from agl_core.emitter.object import emit_object, get_object_value
    from agl_core.emitter.operation import operation
    from agl_core.emitter.reward import (
        RewardPydanticModel,
        emit_reward,
        find_final_reward,
        find_reward_spans,
        get_reward_value,
        get_rewards_from_span,
        is_reward_span,
        reward,
    )
    from agl_core.env_var import (
        LightningEnvVar,
        resolve_bool_env_var,
        resolve_int_env_var,
        resolve_str_env_var,
    )
    from agl_core.litagent.decorator import llm_rollout, prompt_rollout, rollout
    from agl_core.logging import configure_logger
    from agl_core.logging import setup as setup_logging
    from agl_core.logging import setup_module as setup_module_logging
    from agl_core.tracer.agentops import AgentOpsTracer
    from agl_core.tracer.base import Tracer
    from agl_core.tracer.current import clear_active_tracer, get_active_tracer, set_active_tracer
    from agl_core.tracer.dummy import DummyTracer
    from agl_core.tracer.otel import OtelTracer
    from agl_core.types.core import (
        Attempt,
        AttemptedRollout,
        AttemptStatus,
        Dataset,
        EnqueueRolloutRequest,
        FilterField,
        FilterLogic,
        FilterOptions,
        Hook,
        PaginatedResult,
        ParallelWorkerBase,
        Rollout,
        RolloutConfig,
        RolloutMode,
        RolloutStatus,
        SortOptions,
        SortOrder,
        Triplet,
        Worker,
        WorkerStatus,
    )
    from agl_core.types.outcome import AttemptOutcome, FailureKind
    from agl_core.types.resources import (
        LLM,
        NamedResources,
        PromptTemplate,
        ProxyLLM,
        Resource,
        ResourcesUpdate,
        ResourceUnion,
    )
    from agl_core.types.tracer import (
        Attributes,
        AttributeValue,
        Event,
        Link,
        OtelResource,
        RolloutRawResult,
        Span,
        SpanContext,
        SpanCoreFields,
        SpanLike,
        SpanRecordingContext,
        TraceStatus,
        convert_timestamp,
    )

_HOMES = {
    "AgentOpsTracer": "tracer.agentops",
    "Attempt": "types.core",
    "AttemptOutcome": "types.outcome",
    "AttemptStatus": "types.core",
    "AttemptedRollout": "types.core",
    "AttributeValue": "types.tracer",
    "Attributes": "types.tracer",
    "Dataset": "types.core",
    "DummyTracer": "tracer.dummy",
    "EnqueueRolloutRequest": "types.core",
    "Event": "types.tracer",
    "FailureKind": "types.outcome",
    "FilterField": "types.core",
    "FilterLogic": "types.core",
    "FilterOptions": "types.core",
    "Hook": "types.core",
    "IterativeAlgorithm": "algorithm.base",
    "LLM": "types.resources",
    "LightningEnvVar": "env_var",
    "Link": "types.tracer",
    "NamedResources": "types.resources",
    "OtelResource": "types.tracer",
    "OtelTracer": "tracer.otel",
    "PaginatedResult": "types.core",
    "ParallelWorkerBase": "types.core",
    "PromptTemplate": "types.resources",
    "ProxyLLM": "types.resources",
    "Resource": "types.resources",
    "ResourceUnion": "types.resources",
    "ResourcesUpdate": "types.resources",
    "RewardPydanticModel": "emitter.reward",
    "Rollout": "types.core",
    "RolloutConfig": "types.core",
    "RolloutMode": "types.core",
    "RolloutRawResult": "types.tracer",
    "RolloutStatus": "types.core",
    "RunConfig": "config",
    "SortOptions": "types.core",
    "SortOrder": "types.core",
    "Span": "types.tracer",
    "SpanContext": "types.tracer",
    "SpanCoreFields": "types.tracer",
    "SpanLike": "types.tracer",
    "SpanRecordingContext": "types.tracer",
    "TraceStatus": "types.tracer",
    "Tracer": "tracer.base",
    "Triplet": "types.core",
    "VERL": "algorithm.verl.algorithm",
    "Worker": "types.core",
    "WorkerStatus": "types.core",
    "clear_active_tracer": "tracer.current",
    "configure_logger": "logging",
    "convert_timestamp": "types.tracer",
    "emit_annotation": "emitter.annotation",
    "emit_exception": "emitter.exception",
    "emit_message": "emitter.message",
    "emit_object": "emitter.object",
    "emit_reward": "emitter.reward",
    "find_final_reward": "emitter.reward",
    "find_reward_spans": "emitter.reward",
    "get_active_tracer": "tracer.current",
    "get_message_value": "emitter.message",
    "get_object_value": "emitter.object",
    "get_reward_value": "emitter.reward",
    "get_rewards_from_span": "emitter.reward",
    "is_reward_span": "emitter.reward",
    "llm_rollout": "litagent.decorator",
    "operation": "emitter.operation",
    "prompt_rollout": "litagent.decorator",
    "resolve_bool_env_var": "env_var",
    "resolve_int_env_var": "env_var",
    "resolve_str_env_var": "env_var",
    "reward": "emitter.reward",
    "rollout": "litagent.decorator",
    "set_active_tracer": "tracer.current",
    "setup_logging": "logging:setup",
    "setup_module_logging": "logging:setup_module",
}
"""Name to module, with the name there after a colon where it differs."""

__all__ = [
    "LLM",
    "VERL",
    "AgentOpsTracer",
    "Attempt",
    "AttemptOutcome",
    "AttemptStatus",
    "AttemptedRollout",
    "AttributeValue",
    "Attributes",
    "Dataset",
    "DummyTracer",
    "EnqueueRolloutRequest",
    "Event",
    "FailureKind",
    "FilterField",
    "FilterLogic",
    "FilterOptions",
    "Hook",
    "IterativeAlgorithm",
    "LightningEnvVar",
    "Link",
    "NamedResources",
    "OtelResource",
    "OtelTracer",
    "PaginatedResult",
    "ParallelWorkerBase",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourceUnion",
    "ResourcesUpdate",
    "RewardPydanticModel",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutRawResult",
    "RolloutStatus",
    "RunConfig",
    "SortOptions",
    "SortOrder",
    "Span",
    "SpanContext",
    "SpanCoreFields",
    "SpanLike",
    "SpanRecordingContext",
    "TraceStatus",
    "Tracer",
    "Triplet",
    "Worker",
    "WorkerStatus",
    "clear_active_tracer",
    "configure_logger",
    "convert_timestamp",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_active_tracer",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "resolve_bool_env_var",
    "resolve_int_env_var",
    "resolve_str_env_var",
    "reward",
    "rollout",
    "set_active_tracer",
    "setup_logging",
    "setup_module_logging",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{home}"), attribute or name)
