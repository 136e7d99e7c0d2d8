import pickle
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from opentelemetry import trace as otel

from agl_core.emitter import find_final_reward
from agl_core.tracer import OtelTracer
from agl_core.tracer.agentops import AgentOpsTracer


@pytest.fixture
def sdk(monkeypatch):
    """AgentOps as far as its decorators need it: a flag, and spans by the global API."""
    package, core = ModuleType("agentops"), ModuleType("agentops.sdk.core")
    package.__spec__ = ModuleSpec("agentops", None)

    class Sdk(SimpleNamespace):
        _initialized = False

        @property
        def initialized(self):
            return self._initialized

        def judge(self, reward):
            if self.initialized:
                with otel.get_tracer("agentops").start_as_current_span("judge.task") as span:
                    output = f'{{"type": "reward", "value": {reward}}}'
                    span.set_attribute("agentops.task.output", output)

    core.tracer = Sdk()
    for name, module in (("agentops", package), ("agentops.sdk.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    return core.tracer


def test_what_agentops_marks_is_recorded_in_the_attempt(sdk):
    tracer = AgentOpsTracer()
    sdk.judge(0.1)
    with tracer.lifespan():
        sdk.judge(0.2)
        with tracer.attempt("ro-1", "at-1") as trace:
            sdk.judge(0.3)
    sdk.judge(0.4)
    judged, _ = trace.recorded()
    assert judged.name == "judge.task"
    assert find_final_reward([judged]) == 0.3
    assert not sdk.initialized


def test_workers_that_share_it_set_it_up_once(sdk):
    tracer = AgentOpsTracer()
    tracer.init_worker(0)
    tracer.init_worker(1)
    tracer.teardown_worker(0)
    assert sdk.initialized
    tracer.teardown_worker(1)
    tracer.teardown_worker(1)
    assert not sdk.initialized


def test_an_agentops_that_is_in_use_or_not_wanted_is_left_alone(sdk):
    with AgentOpsTracer(agentops_managed=False).lifespan():
        assert not sdk.initialized
    sdk._initialized = True
    with AgentOpsTracer().lifespan():
        pass
    assert sdk.initialized


def test_without_agentops_it_records_as_otel_tracer_does(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tracer = AgentOpsTracer(instrument_managed=False, daemon=False)
    with tracer.lifespan(), tracer.attempt("ro-1", "at-1") as trace:
        tracer.create_span("s")
    assert len(trace.spans()) == 2


@pytest.mark.parametrize(
    "tracer",
    [
        AgentOpsTracer(agentops_managed=False, instrument_managed=False, max_spans_per_attempt=3),
        OtelTracer(instrument_openai=False, max_spans_per_attempt=3),
    ],
)
def test_another_process_gets_a_tracer_with_the_same_settings(tracer):
    again = pickle.loads(pickle.dumps(tracer))
    assert type(again) is type(tracer)
    assert again.max_spans_per_attempt == 3
    assert again.instrument_openai is False
    assert getattr(again, "agentops_managed", False) is False
