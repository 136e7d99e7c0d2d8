"""Tracers of users' own, and OpenTelemetry's API in the code around an attempt."""

import threading
from contextlib import asynccontextmanager

import pytest

import agl_core as agl
from agl_core.errors import AglError
from agl_core.tracer.base import with_active_tracer_context
from agl_core.utils.otel import get_tracer, get_tracer_provider

LLM = {"llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")}


class OwnTracer(agl.Tracer):
    """Overrides what Agent Lightning asks for, and nothing else."""

    @asynccontextmanager
    async def trace_context(self, name=None, *, store=None, rollout_id=None, attempt_id=None):
        yield []

    def get_last_trace(self):
        return []


@agl.rollout
def agent(task, llm):
    if task == "bad":
        raise ValueError("no such task")
    return 0.5


async def step(tracer, task):
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(tracer)
    with runner.run_context(agent=agent, store=store):
        done = await runner.step(task, resources=LLM)
    return done, await store.query_spans(done.rollout_id)


async def test_a_tracer_with_trace_context_alone_runs_an_agent():
    done, spans = await step(OwnTracer(), "good")
    assert done.status == "succeeded"
    assert agl.find_final_reward(spans) == 0.5


class OwnStore(agl.OtelTracer):
    """Overrides `trace_context` without the argument that Agent Lightning's runner never gives."""

    @asynccontextmanager
    async def trace_context(self, name=None, *, rollout_id=None, attempt_id=None):
        async with super().trace_context(
            name, rollout_id=rollout_id, attempt_id=attempt_id
        ) as trace:
            self.create_span("mine")
            yield trace


async def test_a_trace_context_without_a_store_runs_and_its_spans_are_stored():
    done, spans = await step(OwnStore(), "good")
    assert done.status == "succeeded"
    assert {"mine", "agentlightning.annotation"} <= {span.name for span in spans}


async def test_an_agent_that_fails_under_such_a_tracer_fails_with_its_own_error():
    with pytest.raises(ValueError, match="no such task"):
        await step(OwnTracer(), "bad")


async def test_what_a_tracer_of_ones_own_cannot_do_is_said():
    with pytest.raises(AglError, match="OwnTracer does not implement start_call"):
        OwnTracer().start_call("r", "a")
    with pytest.raises(NotImplementedError, match="OwnTracer does not implement start_span"):
        OwnTracer().create_span("x")


async def test_a_decorated_trace_context_makes_its_tracer_the_active_one():
    class Active(OwnTracer):
        @with_active_tracer_context
        @asynccontextmanager
        async def trace_context(self, name=None, **ids):
            yield agl.get_active_tracer()

    tracer = Active()
    async with tracer.trace_context() as active:
        assert active is tracer
    assert agl.get_active_tracer() is None


async def test_what_trace_context_gives_starts_spans_of_the_attempt_in_any_thread():
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout(input=1)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    tracer = agl.OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("manual", store=store, **ids) as trace:
            with trace.start_as_current_span("outer", attributes={"a": 1}):
                trace.start_span("inner").end()
            thread = threading.Thread(target=lambda: trace.start_span("elsewhere").end())
            thread.start()
            thread.join()
    spans = {span.name: span for span in await store.query_spans(rollout.rollout_id)}
    assert sorted(spans) == ["elsewhere", "inner", "manual", "outer"]
    assert spans["inner"].parent_id == spans["outer"].span_id
    assert spans["outer"].parent_id == spans["elsewhere"].parent_id == spans["manual"].span_id
    assert spans["outer"].attributes["a"] == 1


def test_there_is_a_provider_outside_of_attempts():
    with agl.OtelTracer().lifespan():
        assert get_tracer_provider() is not None
        with get_tracer().start_as_current_span("outside"):
            pass  # recorded nowhere, and no error
