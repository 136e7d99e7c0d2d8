import functools
import inspect
import pickle
from pathlib import Path

import pytest

from agl_core.errors import ConfigError
from agl_core.litagent import (
    FunctionalLitAgent,
    LitAgent,
    as_agent,
    llm_rollout,
    load_agent,
    prompt_rollout,
    rollout,
)
from agl_core.types.core import Attempt, AttemptedRollout
from agl_core.types.resources import LLM, PromptTemplate, ProxyLLM
from tests.agl_core.litagent import sample_agents

ATTEMPTED = AttemptedRollout(
    rollout_id="ro-1",
    input={"q": 1},
    start_time=0.0,
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)
MODEL = LLM(endpoint="http://x/v1", model="m")
PROMPT = PromptTemplate(template="{q}")


def sync_agent(task, llm):
    return task, llm


async def async_agent(task, llm, rollout):
    return task, llm, rollout


def prompt_agent(question, prompt_template, rollout=None):
    return question, prompt_template, rollout


class AsyncCallable:
    async def __call__(self, task, llm):
        return task


def test_signatures_are_understood():
    assert as_agent(sync_agent).wants == {"llm"}
    assert not as_agent(sync_agent).is_async()
    assert as_agent(async_agent).wants == {"llm", "rollout"}
    assert as_agent(async_agent).is_async()
    assert as_agent(prompt_agent).wants == {"prompt_template", "rollout"}
    assert as_agent(AsyncCallable()).is_async()
    assert as_agent(functools.partial(async_agent)).is_async()


def test_decorated_function_stays_callable_and_keeps_its_name():
    decorated = rollout(sync_agent)
    assert decorated(1, llm=2) == (1, 2)
    assert decorated.__name__ == decorated.name == "sync_agent"
    assert as_agent(decorated) is decorated


def test_agent_gets_what_it_takes():
    resources = {"main_llm": MODEL, "prompt": PROMPT}
    assert as_agent(sync_agent).rollout(7, resources, ATTEMPTED) == (7, MODEL)
    called = as_agent(prompt_agent).rollout(7, resources, ATTEMPTED)
    assert called == (7, PROMPT, ATTEMPTED)


def test_missing_resource_is_named():
    with pytest.raises(ConfigError, match="takes prompt_template"):
        as_agent(prompt_agent).rollout(7, {"main_llm": MODEL}, ATTEMPTED)


def test_a_proxy_is_bound_to_the_attempt_unless_it_is_to_stay():
    proxy = ProxyLLM(endpoint="http://x/v1", model="m")
    _, bound = rollout(sync_agent).rollout(7, {"main_llm": proxy}, ATTEMPTED)
    assert type(bound) is LLM
    assert bound.endpoint == "http://x/rollout/ro-1/attempt/at-1/v1"
    for decorated in (llm_rollout(strip_proxy=True)(sync_agent), llm_rollout(sync_agent)):
        assert decorated.rollout(7, {"main_llm": proxy}, ATTEMPTED) == (7, bound)
    raw = llm_rollout(strip_proxy=False)(sync_agent)
    assert raw.rollout(7, {"main_llm": proxy}, ATTEMPTED) == (7, proxy)


def test_the_first_of_several_models_is_used(caplog):
    resources = {"prompt": PROMPT, "main_llm": MODEL, "judge": LLM(endpoint="http://y", model="j")}
    assert rollout(sync_agent).rollout(7, resources, ATTEMPTED) == (7, MODEL)
    assert "takes one LLM, gets the first of main_llm, judge" in caplog.text


async def test_the_wrong_variant_is_refused():
    resources = {"main_llm": MODEL}
    assert await rollout(async_agent).rollout_async(7, resources, ATTEMPTED) == (
        7,
        MODEL,
        ATTEMPTED,
    )
    with pytest.raises(RuntimeError, match="is asynchronous"):
        rollout(async_agent).rollout(7, resources, ATTEMPTED)
    with pytest.raises(RuntimeError, match="is synchronous"):
        await rollout(sync_agent).rollout_async(7, resources, ATTEMPTED)


def test_metadata_and_signature_are_kept():
    decorated = prompt_rollout()(prompt_agent)
    assert inspect.signature(decorated) == inspect.signature(prompt_agent)
    assert decorated.__wrapped__ is prompt_agent
    assert isinstance(decorated, LitAgent)


def test_each_decorator_insists_on_its_resource():
    with pytest.raises(ConfigError, match="positional parameter called 'prompt_template'"):
        prompt_rollout(sync_agent)
    with pytest.raises(ConfigError, match="positional parameter called 'llm'"):
        llm_rollout()(prompt_agent)


def test_a_signature_of_no_agent_is_not_implemented():
    with pytest.raises(NotImplementedError, match="at least 2 parameters"):
        rollout(no_resource)


def test_agents_travel_to_other_processes():
    assert pickle.loads(pickle.dumps(sample_agents.decorated)) is sample_agents.decorated
    raw = pickle.loads(pickle.dumps(llm_rollout(strip_proxy=False)(sync_agent)))
    proxy = ProxyLLM(endpoint="http://x/v1", model="m")
    assert raw.rollout(7, {"main_llm": proxy}, ATTEMPTED) == (7, proxy)


def no_resource(task):
    pass


def both(task, llm, prompt_template):
    pass


def unknown(task, llm, tools):
    pass


def keyword_only(*, llm):
    pass


def generator(task, llm):
    yield 1.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_resource, "exactly one of llm and prompt_template"),
        (both, "exactly one of llm and prompt_template"),
        (unknown, "'tools' that nothing fills"),
        (keyword_only, "no first parameter for its task"),
        (lambda: None, "no first parameter for its task"),
        (generator, "is a generator"),
        (3, "an agent is a function"),
        (FunctionalLitAgent, "an agent is a function"),
    ],
)
def test_wrong_signature_is_refused(function, words):
    with pytest.raises(ConfigError, match=words):
        as_agent(function)


def test_agent_is_loaded_by_path():
    agent = load_agent("tests.agl_core.litagent.sample_agents:good")
    assert isinstance(agent, FunctionalLitAgent)
    assert agent.is_async()


def test_an_instance_of_a_class_is_loaded_by_path():
    assert load_agent("tests.agl_core.litagent.sample_agents:classy") is sample_agents.classy


def test_a_module_that_exits_is_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "agent_that_exits.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot import 'agent_that_exits': SystemExit"):
        load_agent("agent_that_exits:solve")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tests.agl_core", "expected 'package.module:attribute'"),
        ("no_such_package.x:agent", "cannot import 'no_such_package.x'"),
        ("tests.agl_core.litagent.sample_agents:nothing", "has no attribute 'nothing'"),
        ("tests.agl_core.litagent.sample_agents:number", "an agent is a function"),
        ("tests.agl_core.litagent.sample_agents:not_an_agent", "exactly one of"),
    ],
)
def test_path_that_is_no_agent_is_refused(path, words):
    with pytest.raises(ConfigError, match=words):
        load_agent(path)


def test_a_builtin_without_a_signature_is_refused():
    with pytest.raises(ConfigError, match="agent max has no signature to read"):
        rollout(max)


def test_what_a_partial_binds_is_not_overwritten():
    def agent(task, llm, rollout):
        return llm.model, rollout

    bound = LLM(endpoint="http://127.0.0.1:1/v1", model="bound")
    other = LLM(endpoint="http://127.0.0.1:1/v1", model="other")
    agent = rollout(functools.partial(agent, llm=bound))
    assert agent.wants == {"rollout"}
    assert agent.rollout("t", {"main_llm": other}, ATTEMPTED) == ("bound", ATTEMPTED)
