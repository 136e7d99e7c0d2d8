"""Errors say the phrases of Agent Lightning 0.3 where both packages refuse the same thing: scripts
match on them. Each phrase is 0.3.0's, without what it fills in."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

import agl_core as agl
from agl_core import semconv
from agl_core.adapter.triplet import TraceTree
from agl_core.algorithm.utils import with_llm_proxy
from agl_core.env_var import LightningEnvVar
from agl_core.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from agl_core.trainer.init_utils import instantiate_from_spec
from agl_core.types.core import Attempt, AttemptedRollout
from agl_core.types.tracer import Span
from agl_core.utils import otel

LLM = agl.LLM(endpoint="http://x/v1", model="m")
NAMED_TWICE: Any = {"name": "a", semconv.OPERATION_NAME: "b"}
ATTEMPTED = AttemptedRollout(
    rollout_id="ro-1",
    input="task",
    start_time=0.0,
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)


def with_model(task: str, llm: agl.LLM) -> float:
    return 1.0


async def with_model_async(task: str, llm: agl.LLM) -> float:
    return 1.0


def with_prompt(task: str, prompt_template: agl.PromptTemplate) -> float:
    return 1.0


def with_other(task: str, other: str) -> float:
    return 1.0


def with_task(task: str) -> float:
    return 1.0


def _span(**attributes: Any) -> Span:
    named = {name.replace("__", "."): value for name, value in attributes.items()}
    return Span.from_attributes(attributes=named, name="openai.chat.completion")


def _query(**arguments: Any) -> Any:
    return asyncio.run(agl.InMemoryLightningStore().query_rollouts(**arguments))


def _store(**thresholds: Any) -> agl.InMemoryLightningStore:
    return agl.InMemoryLightningStore(**thresholds)


def _build(spec: Any, **options: Any) -> Any:
    return agl.build_component(spec, expected_type=agl.OtelTracer, spec_name="tracer", **options)


def _chats(**attributes: Any) -> Any:
    return agl.TraceToMessages().adapt([_span(**attributes)])


class _Algorithm(agl.Algorithm):
    @with_llm_proxy(required=True)
    async def serve(self, llm_proxy: agl.LLMProxy | None) -> None: ...


async def _without_attempts() -> None:
    await agl.InMemoryLightningStore().update_attempt("ro-1", "latest", status="running")


def _resolve(value: str, resolve: Callable[..., Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGL_SERVER_PORT", value)
        return resolve(LightningEnvVar.AGL_SERVER_PORT, fallback=0)


async def _serve_without_a_proxy() -> None:
    await _Algorithm().serve()


async def _serve_without_a_store() -> None:
    entry = {"model": "openai/m", "api_base": "http://127.0.0.1:1/v1"}
    await agl.LLMProxy(model_list=[{"model_name": "m", "litellm_params": entry}]).start()


SAID: list[tuple[str, type[Exception], Callable[[], Any]]] = [
    # Agents
    (
        "No LLM resource found in the provided resources",
        ValueError,
        lambda: agl.rollout(with_model).rollout("task", {}, ATTEMPTED),
    ),
    (
        "No prompt template resource found in the provided resources",
        ValueError,
        lambda: agl.rollout(with_prompt).rollout("task", {"llm": LLM}, ATTEMPTED),
    ),
    (
        "is asynchronous. Use rollout_async instead.",
        RuntimeError,
        lambda: agl.rollout(with_model_async).rollout("task", {"llm": LLM}, ATTEMPTED),
    ),
    (
        "is synchronous. Use rollout instead.",
        RuntimeError,
        lambda: asyncio.run(agl.rollout(with_model).rollout_async("task", {"llm": LLM}, ATTEMPTED)),
    ),
    (
        "Function signature (task: str, other: str) -> float does not match any known agent "
        "patterns",
        NotImplementedError,
        lambda: agl.rollout(with_other),
    ),
    ("must have at least 2 parameters", ValueError, lambda: agl.llm_rollout(with_task)),
    (
        "Function signature (task: str) -> float does not match any known agent patterns",
        NotImplementedError,
        lambda: agl.rollout(with_task),
    ),
    (
        "Agents must implement the `rollout_async` method for async operations",
        NotImplementedError,
        lambda: asyncio.run(agl.LitAgent[Any]().rollout_async("task", {}, ATTEMPTED)),
    ),
    (
        "Unsupported heartbeat launch mode: x",
        ValueError,
        lambda: agl.LitAgentRunner(agl.OtelTracer(), heartbeat_launch_mode="x"),  # pyright: ignore
    ),
    (
        "must have a positional parameter called 'llm'",
        ValueError,
        lambda: agl.llm_rollout(with_other),
    ),
    (
        "must have a positional parameter called 'llm'",
        ValueError,
        lambda: agl.llm_rollout(with_prompt),
    ),
    (
        "must have a positional parameter called 'prompt_template'",
        ValueError,
        lambda: agl.prompt_rollout(with_model),
    ),
    (
        "Agents must implement the `rollout` method",
        NotImplementedError,
        lambda: agl.LitAgent[Any]().rollout("task", {}, ATTEMPTED),
    ),
    (
        "Trainer has not been set for this agent",
        ValueError,
        lambda: agl.LitAgent[Any]().get_trainer(),
    ),
    # Trainer and components
    (
        "Invalid tracer type: int. Expected OtelTracer, str, dict, or None",
        ValueError,
        lambda: _build(3),
    ),
    ("tracer cannot be None", ValueError, lambda: _build(None)),
    (
        "tracer factory returned str, which is not a OtelTracer subclass",
        TypeError,
        lambda: _build(lambda: "x"),
    ),
    (
        "tracer dict must have a 'type' key with the class full name",
        ValueError,
        lambda: _build({"a": 1}),
    ),
    (
        "tracer dict missing 'type' and no default class provided",
        ValueError,
        lambda: _build({"a": 1}, dict_requires_type=False),
    ),
    (
        "component spec must be a string or dict (got int)",
        TypeError,
        lambda: instantiate_from_spec(3),  # pyright: ignore[reportArgumentType]
    ),
    # Algorithms
    ("Subclasses must implement run()", NotImplementedError, lambda: agl.Algorithm().run()),
    (
        "Store has not been set for this algorithm",
        ValueError,
        lambda: agl.Algorithm().get_store(),
    ),
    (
        "Adapter has not been set for this algorithm",
        ValueError,
        lambda: agl.Algorithm().get_adapter(),
    ),
    (
        "LLM proxy is required but not configured",
        ValueError,
        lambda: asyncio.run(_serve_without_a_proxy()),
    ),
    (
        "train_split must be between 0 and 1",
        ValueError,
        lambda: agl.Baseline(train_split=1.5),
    ),
    # Execution
    (
        "main_thread must be 'algorithm' or 'runner'",
        ValueError,
        lambda: SharedMemoryExecutionStrategy(main_thread="x"),  # pyright: ignore
    ),
    (
        "When main_thread is 'runner', n_runners must be 1. Either use 'algorithm' on the main "
        "thread or set n_runners to 1",
        ValueError,
        lambda: SharedMemoryExecutionStrategy(main_thread="runner", n_runners=2),
    ),
    (
        "role must be one of 'algorithm', 'runner', or 'both'",
        ValueError,
        lambda: ClientServerExecutionStrategy(role="x"),  # pyright: ignore
    ),
    (
        "main_process must be 'algorithm' or 'runner'",
        ValueError,
        lambda: ClientServerExecutionStrategy(main_process="x"),  # pyright: ignore
    ),
    (
        "main_process='runner' requires n_runners to be 1",
        ValueError,
        lambda: ClientServerExecutionStrategy(main_process="runner", n_runners=2),
    ),
    # Emitters
    (
        "No active tracer found. Cannot emit",
        RuntimeError,
        lambda: agl.emit_message("x"),
    ),
    (
        "Message must be a string, got:",
        TypeError,
        lambda: agl.emit_message(3, propagate=False),  # pyright: ignore
    ),
    (
        "Expected a BaseException instance, got:",
        TypeError,
        lambda: agl.emit_exception("x", propagate=False),  # pyright: ignore
    ),
    (
        "Object must be JSON serializable, got:",
        RuntimeError,
        lambda: agl.emit_object(object(), propagate=False),
    ),
    (
        "Reward must be a number, got:",
        TypeError,
        lambda: agl.emit_reward("x", propagate=False),  # pyright: ignore
    ),
    (
        "When emitting a multi-dimensional reward as a dict, primary_key must be provided",
        ValueError,
        lambda: agl.emit_reward({"a": 1.0}, propagate=False),
    ),
    (
        "Primary key 'b' not found in reward dict keys",
        ValueError,
        lambda: agl.emit_reward({"a": 1.0}, primary_key="b", propagate=False),
    ),
    (
        "Custom span names are intentionally not supported when used as a context manager",
        ValueError,
        lambda: agl.operation("x"),  # pyright: ignore
    ),
    (
        "Cannot specify both `name` and `additional_attributes.operation_name`",
        ValueError,
        lambda: agl.operation(**NAMED_TWICE),
    ),
    # Store and proxy
    (
        "Rollout ro-1 not found",
        ValueError,
        lambda: asyncio.run(
            agl.InMemoryLightningStore().update_rollout("ro-1", status="cancelled")
        ),
    ),
    ("Rollout ro-1 not found", ValueError, lambda: asyncio.run(_without_attempts())),
    (
        "safe_memory_threshold must be smaller than eviction_memory_threshold",
        ValueError,
        lambda: _store(eviction_memory_threshold=10, safe_memory_threshold=20),
    ),
    (
        "eviction_memory_threshold must be non-negative",
        ValueError,
        lambda: _store(eviction_memory_threshold=-1),
    ),
    (
        "safe_memory_threshold ratio must be between 0 and 1",
        ValueError,
        lambda: _store(safe_memory_threshold=1.5),
    ),
    (
        "Failed to sort items by 'nothing': field does not exist",
        ValueError,
        lambda: _query(sort_by="nothing"),
    ),
    (
        "Unsupported sort order 'up'",
        ValueError,
        lambda: _query(sort_by="status", sort_order="up"),
    ),
    (
        "Store is not set. Please set the store before starting the LLMProxy",
        ValueError,
        lambda: asyncio.run(_serve_without_a_store()),
    ),
    (
        "Unsupported launch mode: x",
        ValueError,
        lambda: agl.LLMProxy(launch_mode="x"),
    ),
    (
        "Invalid middleware alias: 'x'",
        ValueError,
        lambda: agl.LLMProxy(middlewares=["x"]),
    ),
    (
        "Invalid sort_by: nothing, allowed fields are:",
        ValueError,
        lambda: _query(sort_by="nothing"),
    ),
    ("Limit must be greater than 0 or -1 for no limit", ValueError, lambda: _query(limit=-2)),
    ("Offset must be greater than or equal to 0", ValueError, lambda: _query(offset=-1)),
    (
        "Item does not exist with primary key(s): rollout_id='ro-1'",
        ValueError,
        lambda: asyncio.run(
            agl.InMemoryLightningStore().update_rollout("ro-1", status="cancelled")
        ),
    ),
    # Traces, templates, settings
    (
        "No spans provided to create TraceTree.",
        ValueError,
        lambda: TraceTree.from_spans([]),
    ),
    (
        "Extracted prompt from trace is not a list:",
        ValueError,
        lambda: _chats(gen_ai__prompt__role="user"),
    ),
    (
        "Extracted request from trace is not a dict:",
        ValueError,
        lambda: _chats(gen_ai__request__0="x"),
    ),
    (
        "Extracted response from trace is not a dict:",
        ValueError,
        lambda: _chats(gen_ai__response__0="x"),
    ),
    (
        "Only string keys are supported in dictionaries, got '1'",
        ValueError,
        lambda: otel.flatten_attributes({"a": {1: 2}}),
    ),
    (
        "Link value must be a string, got",
        ValueError,
        lambda: otel.make_link_attributes({"a": 1}),  # pyright: ignore
    ),
    (
        "Formatting prompt templates for non-f-string engines with format() helper is not "
        "supported yet",
        NotImplementedError,
        lambda: agl.PromptTemplate(template="x", engine="poml").format(),
    ),
    (
        "AGL_SERVER_PORT must be an integer",
        ValueError,
        lambda: _resolve("x", agl.resolve_int_env_var),
    ),
    ("AGL_SERVER_PORT must be one of", ValueError, lambda: _resolve("x", agl.resolve_bool_env_var)),
    ("Invalid log level: loud", ValueError, lambda: agl.setup_module_logging("loud")),
]


@pytest.mark.parametrize(("phrase", "kind", "refused"), SAID, ids=[said[0] for said in SAID])
def test_an_error_says_what_scripts_match_on(
    phrase: str, kind: type[Exception], refused: Callable[[], Any]
):
    with pytest.raises(kind) as raised:
        refused()
    assert phrase in str(raised.value)


def test_a_level_may_be_in_lower_case():
    assert agl.setup_module_logging(
        "warning", name="agl_core.test_phrases", console=False
    ).level == (logging.WARNING)
