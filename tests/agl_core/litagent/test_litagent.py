import gc
import pickle
from typing import Any

import pytest

from agl_core.errors import ConfigError
from agl_core.litagent import LitAgent
from agl_core.litagent.litagent import method_for
from agl_core.runner import LitAgentRunner
from agl_core.tracer import DummyTracer
from tests.agl_core.litagent.test_decorator import ATTEMPTED


class Holder:
    tracer = DummyTracer()


class Recorder(LitAgent[Any]):
    """Says which method ran."""

    def training_rollout(self, task, resources, rollout):
        return f"training {task}"

    def rollout(self, task, resources, rollout):
        return f"any {task}"


class AsyncRecorder(LitAgent[Any]):
    async def validation_rollout_async(self, task, resources, rollout):
        return f"validation {task}"

    async def rollout_async(self, task, resources, rollout):
        return f"any {task}"


def of_mode(mode: Any) -> Any:
    return ATTEMPTED.model_copy(update={"mode": mode, "input": 7})


def test_the_mode_chooses_the_method():
    agent = Recorder()
    assert not agent.is_async()
    assert agent.call({}, of_mode("train")) == "training 7"
    assert [agent.call({}, of_mode(mode)) for mode in ("val", "test", None)] == ["any 7"] * 3


async def test_an_overridden_async_method_makes_the_agent_async():
    agent = AsyncRecorder()
    assert agent.is_async()
    assert await agent.call({}, of_mode("train")) == "any 7"
    assert await agent.call({}, of_mode("val")) == "validation 7"
    assert method_for("test", is_async=True) == "validation_rollout_async"


async def test_an_agent_that_overrides_nothing_says_so():
    with pytest.raises(NotImplementedError, match="overrides neither rollout nor rollout_async"):
        LitAgent[Any]().call({}, of_mode("train"))
    with pytest.raises(NotImplementedError, match="does not override rollout_async"):
        await LitAgent[Any]().rollout_async(1, {}, ATTEMPTED)


def test_holders_are_unset_at_first():
    agent = Recorder()
    for name in ("tracer", "runner", "trainer"):
        with pytest.raises(ValueError, match=r"the agent has no (runner|trainer) yet"):
            getattr(agent, name)
    with pytest.raises(ValueError, match="no trainer yet"):
        agent.get_trainer()


def test_holders_are_not_kept_alive():
    agent, holder, runner = Recorder(), Holder(), LitAgentRunner(DummyTracer())
    agent.set_trainer(holder)
    assert agent.get_trainer() is holder
    assert agent.get_tracer() is holder.tracer
    agent.set_runner(runner)
    assert agent.get_runner() is runner
    assert agent.tracer is runner.tracer
    del holder, runner
    gc.collect()
    for name in ("runner", "trainer"):
        with pytest.raises(ValueError, match=f"no {name} any more"):
            getattr(agent, name)


def test_an_agent_travels_without_its_holders():
    agent, holder = Recorder(), Holder()
    agent.note = "kept"
    agent.set_trainer(holder)
    copy = pickle.loads(pickle.dumps(agent))
    assert copy.note == "kept"
    with pytest.raises(ValueError, match="no trainer yet"):
        copy.trainer  # noqa: B018


def test_trained_agents_is_deprecated():
    with pytest.warns(DeprecationWarning, match="agent_match"):
        assert LitAgent[Any](trained_agents="a").trained_agents == "a"


def answer(self, task, resources, rollout):
    return 1.0


async def answer_async(self, task, resources, rollout):
    return 1.0


def agent_with(*names: str) -> LitAgent[Any]:
    methods = {name: answer_async if name.endswith("_async") else answer for name in names}
    return type("Mixed", (LitAgent,), methods)()


@pytest.mark.parametrize(
    "names",
    [
        ("rollout", "validation_rollout_async"),
        ("rollout_async", "validation_rollout"),
        ("training_rollout", "validation_rollout_async"),
    ],
)
def test_a_sync_method_of_an_async_agent_that_would_never_run_is_refused(names):
    with pytest.raises(ConfigError, match="would never run"):
        agent_with(*names).check_methods()
    with pytest.raises(ConfigError, match="would never run"):
        LitAgentRunner(DummyTracer()).init(agent_with(*names))


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("rollout", "rollout_async"),
        ("training_rollout", "validation_rollout"),
        ("training_rollout_async",),
        ("training_rollout", "training_rollout_async", "rollout_async"),
    ],
)
def test_an_agent_whose_methods_all_run_is_fine(names):
    agent_with(*names).check_methods()
