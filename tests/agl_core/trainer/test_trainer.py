"""What a trainer is given, what it makes of that, and what it says no to."""

import asyncio
from typing import Any

import pytest

import agl_core as agl
from agl_core.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agl_core.errors import ConfigError
from agl_core.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from agl_core.litagent import as_agent
from agl_core.llm_proxy import LLMProxy
from agl_core.runner import LitAgentRunner
from agl_core.store import InMemoryLightningStore, SqliteLightningStore
from agl_core.tracer import AgentOpsTracer, DummyTracer, OtelTracer
from agl_core.trainer import Trainer
from agl_core.types.core import Hook
from agl_core.types.resources import PromptTemplate
from tests.agents import asks_once
from tests.agl_core.execution import work
from tests.fakes import ScriptedModelServer, decode_chars

SHM = {"type": "shm", "graceful_delay": 1.0}


def test_the_defaults():
    trainer = Trainer()
    assert type(trainer.tracer) is OtelTracer
    assert type(trainer.adapter) is TracerTraceToTriplet
    assert type(trainer.strategy) is ClientServerExecutionStrategy
    assert type(trainer.store) is InMemoryLightningStore
    assert type(trainer.runner) is LitAgentRunner
    assert trainer.runner.tracer is trainer.tracer
    assert (trainer.algorithm, trainer.llm_proxy, trainer.hooks) == (None, None, ())
    assert (trainer.n_runners, trainer.max_rollouts) == (1, None)


def test_each_component_is_made_from_what_is_given(tmp_path: Any):
    trainer = Trainer(
        tracer={"type": "agl_core.tracer.AgentOpsTracer", "agentops_managed": False},
        adapter={"agent_match": "a"},
        store={"type": "agl_core.SqliteLightningStore", "path": str(tmp_path / "s.db")},
        runner={"poll_interval": 2.0},
        strategy="shm",
        algorithm=work.Enqueues,
        llm_proxy={"port": 0},
        max_rollouts=3,
        n_runners=2,
    )
    assert isinstance(trainer.tracer, AgentOpsTracer)
    assert isinstance(trainer.adapter, TracerTraceToTriplet)
    assert isinstance(trainer.store, SqliteLightningStore)
    assert isinstance(trainer.runner, LitAgentRunner)
    assert (trainer.runner.poll_interval, trainer.runner.max_rollouts) == (2.0, 3)
    assert isinstance(trainer.strategy, SharedMemoryExecutionStrategy)
    assert (trainer.strategy.n_runners, trainer.strategy.main_thread) == (2, "algorithm")
    assert isinstance(trainer.algorithm, work.Enqueues)
    assert isinstance(trainer.llm_proxy, LLMProxy)
    assert trainer.llm_proxy.get_store() is trainer.store


def test_a_class_and_a_factory_are_components_too():
    trainer = Trainer(tracer=DummyTracer, adapter=lambda: LlmProxyTraceToTriplet(), port=5001)
    assert isinstance(trainer.tracer, DummyTracer)
    assert isinstance(trainer.adapter, LlmProxyTraceToTriplet)
    assert trainer.strategy.server_port == 5001  # pyright: ignore


def test_renamed_arguments_work_and_are_told():
    with pytest.warns(DeprecationWarning, match="n_workers is deprecated; use n_runners") as told:
        trainer = Trainer(n_workers=3)
    assert told[0].filename == __file__
    assert trainer.n_runners == trainer.n_workers == 3
    with pytest.warns(DeprecationWarning, match="max_tasks is deprecated; use max_rollouts"):
        assert Trainer(max_tasks=4).max_rollouts == 4
    with pytest.warns(DeprecationWarning, match="triplet_exporter is deprecated; use adapter"):
        trainer = Trainer(triplet_exporter=LlmProxyTraceToTriplet())
    assert isinstance(trainer.adapter, LlmProxyTraceToTriplet)
    with pytest.warns(DeprecationWarning, match="n_workers"):
        assert Trainer(n_workers=3, n_runners=2).n_runners == 2
    with pytest.warns(DeprecationWarning, match=r"dev is deprecated; call Trainer.dev\(\)"):
        Trainer(dev=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "shm", "port": 1}, "port is 1, but SharedMemoryExecutionStrategy has no"),
        ({"strategy": {"type": "cs", "server_port": 2}, "port": 1}, "port is 1, and the strategy"),
        ({"strategy": {"type": "cs", "n_runners": 2}, "n_runners": 4}, "n_runners is 4, and the"),
        ({"n_runners": 0}, "n_runners must be at least 1; got 0"),
        ({"strategy": "prefekt"}, "strategy: there is no 'prefekt'; give cs, prefect, shm, or a"),
        ({"daemon": False}, "daemon=False is not supported"),
        ({"runner": {"polling": 1}}, "LitAgentRunner has no argument 'polling'"),
        (
            {"runner": LitAgentRunner(OtelTracer()), "max_rollouts": 2},
            "max_rollouts is 2, and the runner given has None",
        ),
        (
            {"runner": LitAgentRunner(OtelTracer()), "tracer": OtelTracer},
            "the runner given has another tracer",
        ),
        ({"algorithm": 5}, "algorithm cannot be int"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_an_error(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Trainer(**options)


def test_what_is_missing_is_told_before_anything_starts():
    trainer = Trainer(algorithm=work.Enqueues(), strategy="shm")
    with pytest.raises(TypeError, match=r"not a LitAgent: .*is the function decorated with"):
        trainer.fit(lambda task: 1.0, [1])  # pyright: ignore
    with pytest.raises(TypeError, match="train_dataset is a text"):
        trainer.fit(work.doubles, "http://127.0.0.1:9999")  # pyright: ignore
    with pytest.raises(TypeError, match="val_dataset must have a length and rows by position"):
        trainer.fit(work.doubles, [1], val_dataset=iter([1]))  # pyright: ignore
    with pytest.raises(ConfigError, match="the trainer has no algorithm"):
        Trainer().fit(work.doubles, [1])
    with pytest.raises(TypeError, match="hooks: 5 is no Hook"):
        Trainer(hooks=[5])  # pyright: ignore


class Notes(Hook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        self.seen.append(f"start {rollout.input}")

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.seen.append(f"{len(tracer.get_last_trace())} spans")

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        self.seen.append(f"end {agent.trainer.n_runners}")


def test_an_agent_without_its_model_is_told_before_a_rollout_runs():
    trainer = Trainer(strategy=SHM, algorithm=agl.Baseline())
    with pytest.raises(ConfigError, match=r"takes llm, .* give the trainer initial_resources"):
        trainer.fit(as_agent(asks_once), [{"question": "x"}])
    assert len(asyncio.run(trainer.store.query_rollouts())) == 0


def test_hooks_are_called_around_each_attempt():
    hook = Notes()
    Trainer(strategy=SHM, algorithm=work.Enqueues(), hooks=hook).fit(work.doubles, [7])
    assert hook.seen == ["start 7", "2 spans", "end 1"]


def test_the_algorithm_gets_what_it_works_with():
    class Asks(work.Enqueues):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            assert self.get_trainer() is trainer
            assert self.get_adapter() is trainer.adapter
            assert self.get_llm_proxy() is None
            assert self.get_initial_resources() == resources
            assert (train_dataset, val_dataset) == ([1], [2])
            await super().run(train_dataset)

    resources: agl.NamedResources = {**work.RESOURCES, "p": PromptTemplate(template="{x}")}
    trainer = Trainer(strategy=SHM, algorithm=(asks := Asks()), initial_resources=resources)
    trainer.fit(work.doubles, [1], val_dataset=[2])
    assert asks.rewards == [2.0]


def test_a_trainer_fits_again():
    algorithm = work.Enqueues()
    trainer = Trainer(strategy=SHM, algorithm=algorithm)
    trainer.fit(work.doubles, [1])
    trainer.fit(work.doubles, [2])
    assert algorithm.rewards == [2.0, 4.0]


class OwnsItsProxy(work.Enqueues):
    """Starts the trainer's proxy, and reads triplets."""

    def __init__(self) -> None:
        super().__init__()
        self.triplets: list[agl.Triplet] = []

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        proxy = self.get_llm_proxy()
        assert proxy is not None
        await proxy.start()
        self.set_initial_resources({"main_llm": proxy.as_resource()})
        await super().run(train_dataset)
        await asyncio.sleep(0.5)  # the proxy sends what it records every 0.2 s
        for one in await self.get_store().query_rollouts():
            spans = await self.get_store().query_spans(one.rollout_id, "latest")
            self.triplets += self.get_adapter().adapt(list(spans))


@pytest.mark.parametrize("strategy", [SHM, {"type": "cs", "server_port": 0}])
def test_the_proxy_of_an_algorithm_records_what_agents_call(strategy: dict[str, Any]):
    algorithm = OwnsItsProxy()
    with ScriptedModelServer() as server:
        parameters = {"model": "hosted_vllm/scripted", "api_base": server.base_url}
        trainer = Trainer(
            strategy=strategy,
            algorithm=algorithm,
            n_runners=2,
            llm_proxy={"model_list": [{"model_name": "scripted", "litellm_params": parameters}]},
        )
        trainer.fit(as_agent(asks_once), [{"question": "one"}, {"question": "two"}])
    assert algorithm.statuses == ["succeeded"] * 2
    texts = [decode_chars(one.prompt["token_ids"]) for one in algorithm.triplets]
    assert sorted("one" in text for text in texts) == [False, True]
    assert all(one.response["token_ids"] for one in algorithm.triplets)
    assert not trainer.llm_proxy.is_running()  # pyright: ignore


def test_dev_runs_the_agent_with_an_algorithm_that_only_does_that():
    fast = pytest.importorskip("agl_core.algorithm.fast")
    hook = Notes()
    trainer = Trainer(strategy=SHM, initial_resources=work.RESOURCES, hooks=hook)
    trainer.dev(work.doubles, [3], val_dataset=[4])
    assert hook.seen[::3] == ["start 3", "start 4"]
    with pytest.raises(ConfigError, match=r"dev\(\) needs inputs"):
        trainer.dev(work.doubles)
    with pytest.raises(ConfigError, match="agent doubles takes llm, but no such resource"):
        Trainer(strategy=SHM).dev(work.doubles, [3])
    with pytest.raises(TypeError, match="Enqueues is no FastAlgorithm"):
        Trainer(strategy=SHM, algorithm=work.Enqueues()).dev(work.doubles, [3])
    with pytest.warns(DeprecationWarning, match="dev is deprecated"):
        trainer = Trainer(dev=True, strategy=SHM, algorithm=fast.Baseline())
    trainer.initial_resources = work.RESOURCES
    trainer.fit(work.doubles, [3])
