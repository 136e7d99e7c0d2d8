"""Agents written for Agent Lightning 0.3 find its names where they import them from."""

import importlib
import subprocess
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
    "configure_logger setup_logging setup_module_logging VERL LLMProxy "
    "Algorithm Baseline FastAlgorithm algo "
    "Trainer build_component ExecutionStrategy SharedMemoryExecutionStrategy "
    "ClientServerExecutionStrategy ExecutionEvent ThreadingEvent MultiprocessingEvent",
    "adapter": "Adapter TraceAdapter TracerTraceToTriplet LlmProxyTraceToTriplet TraceToMessages",
    "adapter.base": "Adapter OtelTraceAdapter TraceAdapter",
    "adapter.messages": "OpenAIMessages TraceToMessages",
    "adapter.triplet": "RewardMatchPolicy TraceTree TraceToTripletBase TracerTraceToTriplet "
    "LlmProxyTraceToTriplet",
    "algorithm": "Algorithm Baseline FastAlgorithm VERL algo",
    "algorithm.base": "Algorithm",
    "algorithm.decorator": "AlgorithmFunc FunctionalAlgorithm algo",
    "algorithm.fast": "Baseline FastAlgorithm",
    "algorithm.verl": "VERL",
    "algorithm.verl.interface": "VERL",
    "algorithm.utils": "with_store with_llm_proxy batch_iter_over_dataset",
    "emitter": "reward operation emit_reward get_reward_value get_rewards_from_span "
    "is_reward_span find_reward_spans find_final_reward emit_message emit_object emit_exception "
    "emit_annotation get_message_value get_object_value",
    "emitter.annotation": "emit_annotation operation OperationContext",
    "emitter.exception": "emit_exception",
    "emitter.message": "emit_message get_message_value",
    "emitter.object": "emit_object encode_object get_object_value",
    "emitter.reward": "RewardDimension reward emit_reward get_reward_value "
    "get_rewards_from_span is_reward_span "
    "find_reward_spans find_final_reward",
    "env_var": "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    "execution": "ExecutionStrategy ClientServerExecutionStrategy ExecutionEvent ThreadingEvent "
    "MultiprocessingEvent SharedMemoryExecutionStrategy",
    "execution.base": "AlgorithmBundle ExecutionStrategy RunnerBundle",
    "execution.client_server": "ClientServerExecutionStrategy",
    "execution.events": "ExecutionEvent ThreadingEvent MultiprocessingEvent",
    "execution.shared_memory": "SharedMemoryExecutionStrategy",
    "litagent": "LitAgent rollout llm_rollout prompt_rollout",
    "litagent.decorator": "FunctionalLitAgent FunctionalLitAgentFunc LlmRolloutFunc "
    "PromptRolloutFunc rollout llm_rollout prompt_rollout",
    "litagent.litagent": "LitAgent",
    "llm_proxy": "LLMProxy ModelConfig",
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
    "tracer.base": "Tracer set_active_tracer get_active_tracer clear_active_tracer "
    "with_active_tracer_context",
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


EXAMPLES = (
    "Trainer VERL Dataset LLM ProxyLLM PromptTemplate NamedResources Rollout AttemptedRollout "
    "LitAgent rollout emit_reward emit_exception operation find_final_reward reward LitAgentRunner "
    "InMemoryLightningStore LightningStoreThreaded LightningStoreServer LightningStoreClient "
    "LLMProxy AgentOpsTracer OtelTracer TracerTraceToTriplet LlmProxyTraceToTriplet "
    "TraceToMessages Algorithm algo Hook setup_logging LightningEnvVar resolve_bool_env_var "
    "resolve_int_env_var resolve_str_env_var llm_proxy.ModelConfig "
    "algorithm.utils.batch_iter_over_dataset utils.otel.make_tag_attributes "
    "utils.otel.make_link_attributes"
)
EXAMPLES_LEFT_OUT = {
    "APO": "algorithm.apo",
    "MongoLightningStore": "store.mongo",
    "WeaveTracer": "tracer.weave",
    "MetricsBackend": "utils.metrics",
    "DevTaskLoader": "client",
    "AgentLightningServer": "server",
}
"""What the examples use besides, and the module of 0.3 that has it."""


@pytest.mark.parametrize("path", EXAMPLES.split())
def test_what_the_examples_of_agent_lightning_import_is_here(path: str):
    """The names that its examples use, as a reader listed them: its source distribution, which has
    the files, is not at hand."""
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(f"agl_core.{module}".rstrip(".")), name)


@pytest.mark.parametrize(("name", "module"), EXAMPLES_LEFT_OUT.items())
def test_what_the_examples_import_and_is_not_here_has_a_reason(name: str, module: str):
    assert not hasattr(agl_core, name)
    assert NOT_HERE[module]


BEFORE_02 = "the protocol before 0.2 is not served"
STORE_INSIDE = "the store's own inside: it is SQL here"
INSTRUMENTATION = "the tracers instrument clients, and the proxy records token ids"
VERL_INSIDE = "VERL is driven by functions of our own; `VERL` is the way in"
NOT_HERE = {
    "algorithm.apo": "APO is not written yet",
    "cli": "the command line is `agl` (deployments/cli.py)",
    "client": BEFORE_02,
    "config": "lightning_cli: give Trainer its arguments, or a file to `agl train`",
    "execution.inter_process": "not implemented in 0.3 either",
    "instrumentation": INSTRUMENTATION,
    "runner.legacy": BEFORE_02,
    "server": BEFORE_02,
    "store.collection": STORE_INSIDE,
    "store.mongo": "MongoLightningStore: SQLite is the store on disk",
    "store.utils": STORE_INSIDE,
    "tracer.weave": "WeaveTracer",
    "trainer.legacy": BEFORE_02,
    "utils.id": "an inside helper; use uuid",
    "utils.metrics": "metrics of the server itself are not kept",
    "utils.otlp": "OTLP is `agl_core.tracer.otlp`",
    "utils.server_launcher": "one server in a thread; arguments of launchers are refused",
    "verl": VERL_INSIDE,
}
"""Modules of 0.3 that are not here, with those below them, and why."""
NOT_IN = {
    "": "APO AgentLightningClient AgentLightningServer DevTaskLoader GenericResponse "
    "LegacyAgentRunner RolloutLegacy RolloutRawResultLegacy SpanAttributeNames SpanNames Task "
    "TaskIfAny lightning_cli",  # each is named below, or in NOT_HERE
    "adapter.messages": "convert_to_openai_messages group_genai_dict",  # inside
    "adapter.triplet": "Transition",  # unused in 0.3
    "algorithm": "APO",
    "algorithm.decorator": "AF AlgorithmFuncAsync AlgorithmFuncAsyncFallback "
    "AlgorithmFuncAsyncFull "
    "AlgorithmFuncAsyncLike AlgorithmFuncAsyncOnlyDataset AlgorithmFuncAsyncOnlyStore "
    "AlgorithmFuncSync AlgorithmFuncSyncFallback AlgorithmFuncSyncFull AlgorithmFuncSyncLike "
    "AlgorithmFuncSyncOnlyDataset AlgorithmFuncSyncOnlyStore AsyncFlag",  # AlgorithmFunc is there
    "litagent.decorator": "LlmRolloutFuncAsync2 LlmRolloutFuncAsync3 LlmRolloutFuncSync2 "
    "LlmRolloutFuncSync3 PromptRolloutFuncAsync2 PromptRolloutFuncAsync3 PromptRolloutFuncSync2 "
    "PromptRolloutFuncSync3",  # one type for all: LlmRolloutFunc, PromptRolloutFunc
    "litagent.litagent": "is_v0_1_rollout_api",
    "llm_proxy": "AddLogprobs AddReturnTokenIds LightningOpenTelemetry LightningSpanExporter "
    "MessageInspectionMiddleware RolloutAttemptMiddleware StreamConversionMiddleware "
    "get_active_llm_proxy initialize_llm_callbacks set_active_llm_proxy",  # parts of LiteLLM's
    "runner": "LegacyAgentRunner",
    "store.client_server": "CachedStaticFiles DequeueManyRolloutsRequest DequeueRolloutRequest "
    "EnqueueManyRolloutsRequest NextSequenceIdRequest NextSequenceIdResponse QueryAttemptsRequest "
    "QueryResourcesRequest QueryRolloutsRequest QuerySpansRequest QueryWorkersRequest "
    "RolloutRequest StartAttemptRequest UpdateAttemptRequest UpdateRolloutRequest "
    "UpdateWorkerRequest WaitForRolloutsRequest "
    "API_V1_PREFIX API_AGL_PREFIX API_V1_AGL_PREFIX",  # HTTP bodies: one table, `store.wire`
    "store.collection_based": "COLLECTION_STORE_ALL_METHODS COLLECTION_STORE_PUBLIC_METHODS "
    "get_current_store_methods healthcheck_before tracked",  # the store's own inside
    "store.memory": "estimate_model_size",
    "tracer.dummy": "DummySpanRecordingContext",
    "tracer.otel": "LightningSpanProcessor OtelSpanRecordingContext STORE_WRITE_TIMEOUT_SECONDS "
    "to_otel_status_code",  # there is one recording context
    "trainer.init_utils": "OptionalDefaults",
    "trainer.trainer": "ComponentSpec",
    "types.core": "GenericResponse RolloutLegacy RolloutRawResult RolloutRawResultLegacy Task "
    "TaskIfAny",  # RolloutRawResult is in agl_core.types
    "types.tracer": "SpanAttributeNames SpanNames extract_extra_fields",  # 0.3: use semconv
    "utils.otel": "get_span_processors sanitize_list_attribute_sanity",
}
"""Names of modules that are here, which these do not have."""


@pytest.mark.parametrize("module", NOT_HERE)
def test_a_module_that_is_said_to_be_missing_is(module: str):
    try:
        found = importlib.import_module(f"agl_core.{module}")
    except ModuleNotFoundError:
        return
    assert module == "config", "take it off the list"
    assert not hasattr(found, "lightning_cli")


@pytest.mark.parametrize(("module", "names"), NOT_IN.items())
def test_a_name_that_is_said_to_be_missing_is(module: str, names: str):
    found = importlib.import_module(f"agl_core.{module}" if module else "agl_core")
    assert [name for name in names.split() if hasattr(found, name)] == []


def test_the_deprecated_module_of_rewards_says_so():
    sys.modules.pop("agl_core.reward", None)
    with pytest.deprecated_call():
        module = importlib.import_module("agl_core.reward")
    assert module.emit_reward is agl_core.emit_reward


def test_a_star_import_works_without_the_extra_train():
    code = (
        "import sys; sys.modules['verl'] = None\n"
        "from agl_core import *\n"
        "assert Trainer and 'VERL' not in globals()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


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
