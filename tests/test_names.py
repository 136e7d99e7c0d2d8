"""Agents written for Agent Lightning 0.3 find its names where they import them from."""

import importlib
import sys

import pytest

import agl_core

NAMES = {
    "": "Adapter OtelTraceAdapter TraceAdapter TraceToMessages TraceToTripletBase "
    "TracerTraceToTriplet LlmProxyTraceToTriplet LitAgent rollout llm_rollout prompt_rollout "
    "Runner LitAgentRunner LightningStore LightningStoreCapabilities LightningStoreStatistics "
    "CollectionBasedLightningStore InMemoryLightningStore LightningStoreThreaded "
    "LightningStoreServer LightningStoreClient Tracer AgentOpsTracer OtelTracer DummyTracer "
    "set_active_tracer get_active_tracer clear_active_tracer emit_annotation emit_exception "
    "emit_message emit_object emit_reward operation reward find_final_reward find_reward_spans "
    "is_reward_span get_reward_value get_rewards_from_span get_message_value get_object_value "
    "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var "
    "configure_logger setup_logging setup_module_logging LLMProxy Algorithm Baseline FastAlgorithm "
    "VERL algo Trainer build_component ExecutionStrategy SharedMemoryExecutionStrategy "
    "ClientServerExecutionStrategy ExecutionEvent ThreadingEvent MultiprocessingEvent",
    "adapter": "Adapter TraceAdapter TracerTraceToTriplet LlmProxyTraceToTriplet TraceToMessages",
    "adapter.base": "Adapter OtelTraceAdapter TraceAdapter",
    "adapter.messages": "OpenAIMessages TraceToMessages",
    "adapter.triplet": "RewardMatchPolicy TraceTree TraceToTripletBase TracerTraceToTriplet "
    "LlmProxyTraceToTriplet",
    "algorithm": "Algorithm Baseline FastAlgorithm VERL algo",
    "algorithm.base": "Algorithm",
    "algorithm.decorator": "FunctionalAlgorithm algo",
    "algorithm.fast": "Baseline FastAlgorithm",
    "algorithm.utils": "with_store with_llm_proxy batch_iter_over_dataset",
    "emitter": "reward operation emit_reward get_reward_value get_rewards_from_span "
    "is_reward_span find_reward_spans find_final_reward emit_message emit_object emit_exception "
    "emit_annotation get_message_value get_object_value",
    "emitter.annotation": "emit_annotation",
    "emitter.exception": "emit_exception",
    "emitter.message": "emit_message get_message_value",
    "emitter.object": "emit_object encode_object get_object_value",
    "emitter.reward": "reward emit_reward get_reward_value get_rewards_from_span is_reward_span "
    "find_reward_spans find_final_reward",
    "env_var": "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    "execution": "ExecutionStrategy ClientServerExecutionStrategy ExecutionEvent ThreadingEvent "
    "MultiprocessingEvent SharedMemoryExecutionStrategy",
    "execution.base": "AlgorithmBundle ExecutionStrategy RunnerBundle",
    "execution.client_server": "ClientServerExecutionStrategy",
    "execution.events": "ExecutionEvent ThreadingEvent MultiprocessingEvent",
    "execution.shared_memory": "SharedMemoryExecutionStrategy",
    "litagent": "LitAgent rollout llm_rollout prompt_rollout",
    "litagent.decorator": "rollout llm_rollout prompt_rollout",
    "litagent.litagent": "LitAgent",
    "llm_proxy": "LLMProxy",
    "logging": "setup configure_logger setup_module",
    "runner": "Runner LitAgentRunner",
    "runner.agent": "LitAgentRunner",
    "runner.base": "Runner",
    "semconv": "AGL_ANNOTATION AGL_MESSAGE AGL_OBJECT AGL_EXCEPTION AGL_OPERATION AGL_REWARD "
    "AGL_VIRTUAL LightningResourceAttributes LightningSpanAttributes RewardAttributes "
    "RewardPydanticModel LinkAttributes LinkPydanticModel",
    "store": "LightningStore InMemoryLightningStore LightningStoreThreaded LightningStoreServer "
    "LightningStoreClient",
    "store.base": "LightningStore LightningStoreCapabilities LightningStoreStatistics UNSET "
    "is_queuing is_running is_finished",
    "store.client_server": "LightningStoreServer LightningStoreClient",
    "store.collection_based": "CollectionBasedLightningStore",
    "store.memory": "InMemoryLightningStore",
    "store.threading": "LightningStoreThreaded",
    "tracer": "Tracer OtelTracer DummyTracer AgentOpsTracer",
    "tracer.agentops": "AgentOpsTracer",
    "tracer.base": "Tracer set_active_tracer get_active_tracer clear_active_tracer",
    "tracer.dummy": "DummyTracer",
    "tracer.otel": "OtelTracer",
    "trainer": "Trainer build_component",
    "trainer.init_utils": "build_component instantiate_component instantiate_from_spec load_class",
    "trainer.registry": "ExecutionStrategyRegistry",
    "trainer.trainer": "Trainer",
    "types": "Triplet RolloutRawResult RolloutMode ParallelWorkerBase Dataset AttemptStatus "
    "RolloutStatus RolloutConfig Rollout Attempt AttemptedRollout EnqueueRolloutRequest Hook "
    "Worker WorkerStatus PaginatedResult FilterOptions SortOptions FilterField TaskInput "
    "AttributeValue Attributes TraceState SpanContext TraceStatus Event Link OtelResource Span "
    "SpanLike StatusCode SpanCoreFields SpanRecordingContext Resource LLM ProxyLLM "
    "PromptTemplate ResourceUnion NamedResources ResourcesUpdate",
    "types.core": "Triplet Rollout Attempt AttemptedRollout RolloutConfig Hook Worker",
    "types.resources": "LLM ProxyLLM PromptTemplate NamedResources ResourcesUpdate",
    "types.tracer": "Span SpanContext TraceStatus SpanCoreFields OtelResource",
    "utils.otel": "full_qualified_name get_tracer_provider get_tracer make_tag_attributes "
    "extract_tags_from_attributes make_link_attributes query_linked_spans "
    "extract_links_from_attributes filter_attributes filter_and_unflatten_attributes "
    "flatten_attributes unflatten_attributes sanitize_attribute_value sanitize_attributes "
    "check_attributes_sanity format_exception_attributes",
    "utils.system_snapshot": "system_snapshot",
}


@pytest.mark.parametrize(("module", "names"), NAMES.items())
def test_a_module_has_its_names(module: str, names: str):
    found = importlib.import_module(f"agl_core.{module}" if module else "agl_core")
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_the_package_can_be_imported_by_the_old_name(monkeypatch: pytest.MonkeyPatch):
    """As a program that cannot be edited would: one alias for each module."""
    for module in NAMES:
        path = f".{module}" if module else ""
        old = importlib.import_module(f"agl_core{path}")
        monkeypatch.setitem(sys.modules, f"agentlightning{path}", old)
    code = "import agentlightning as agl\nfrom agentlightning.store.base import LightningStore\n"
    names: dict[str, object] = {}
    exec(code, names)
    assert names["agl"] is agl_core
    assert names["LightningStore"] is agl_core.LightningStore
