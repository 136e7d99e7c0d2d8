"""`Trainer(strategy="prefect")`: the same agent and algorithm as a run of the deployed pipeline."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agl_core import VERL, Baseline, DummyTracer, LitAgent, Trainer, algo, rollout
from agl_core.errors import ConfigError, ExecutionError
from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.lifeline import ChildProcess
from agl_core.serving.launch import ModelServer
from deployments.cli import app
from deployments.strategy import PrefectExecutionStrategy, find_path
from examples.calculator.agent import calculator
from tests.algorithms import OddRows
from tests.conftest import CALCULATOR, small_run
from tests.e2e.deployed import Api, start_worker

POLICY = str(CALCULATOR / "policy")
POOL = "trainers"
AGENT = rollout(calculator)


@pytest.fixture(scope="module")
def api(prefect_api: str) -> Iterator[Api]:
    with Api(prefect_api) as client:
        client.remove_deployments()
        yield client


@pytest.fixture(scope="module")
def worker(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildProcess]:
    done = CliRunner().invoke(app, ["deploy", "--pool", POOL])
    assert done.exit_code == 0, done.exception
    api.remove_automations()
    prefect = Path(sys.executable).with_name("prefect")
    env = os.environ | {"PYTHONPATH": str(Path.cwd())}
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with start_worker(prefect, log, env, POOL) as process:
        yield process


def rows(name: str, count: int) -> list[Any]:
    lines = (CALCULATOR / f"data/{name}.jsonl").read_text().splitlines()[:count]
    return [json.loads(line) for line in lines]


def trainer_of(algorithm: Any, ledger: Path, engine_url: str, run_id: str, **rest: Any) -> Trainer:
    strategy = PrefectExecutionStrategy(
        run_id=run_id,
        ledger=str(ledger),
        serving={"url": engine_url},
        preflight={"canary": False},
        timeout_seconds=300.0,
        **rest,
    )
    return Trainer(algorithm=algorithm, strategy=strategy)


def small_verl() -> VERL:
    config = small_run("http://unused", "unused").algorithm.config
    return VERL(config | {"trainer.total_training_steps": 1})


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("run_id", "algorithm", "model", "coverage"),
    [
        ("by-verl", small_verl, None, [(16, 16)]),
        pytest.param("by-baseline", Baseline, POLICY, [(20, 0)], marks=pytest.mark.long),
        ("by-odd-rows", lambda: OddRows(POLICY, first=0), None, [(4, 0), (4, 0)]),
    ],
)
def test_an_agent_is_trained_by_the_deployed_pipeline(
    engine: ModelServer,
    tmp_path: Path,
    run_id: str,
    algorithm: Any,
    model: str | None,
    coverage: Any,
):
    trainer = trainer_of(algorithm(), tmp_path, engine.url, run_id, model=model)
    trainer.fit(AGENT, rows("train", 20), val_dataset=rows("val", 8))
    ledger = open_run(str(tmp_path), run_id)
    found = [manifest.coverage for manifest in ledger.manifests()]
    assert [(one.expected, one.trained) for one in found] == coverage
    assert ledger.record().datasets["train"].file.rows == 20
    assert ledger.record().config.agent == "examples.calculator.agent:calculator"
    assert verify_run(ledger) == []


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_a_run_that_fails_says_why(tmp_path: Path):
    trainer = trainer_of(small_verl(), tmp_path, "http://127.0.0.1:9", "fails")
    with pytest.raises(ExecutionError, match=r"run fails ended as Failed: .*127\.0\.0\.1:9"):
        trainer.fit(AGENT, rows("train", 20))


def test_a_run_that_nobody_starts_is_given_up_and_cancelled(
    api: Api, engine: ModelServer, tmp_path: Path
):
    done = CliRunner().invoke(app, ["deploy", "--pool", "nobody"])
    assert done.exit_code == 0, done.exception
    api.remove_automations()
    trainer = trainer_of(
        small_verl(), tmp_path, engine.url, "unstarted", startup_timeout_seconds=1.0
    )
    with pytest.raises(ExecutionError, match=r"not started within 1 s: .*no worker polls it"):
        trainer.fit(AGENT, rows("train", 20))
    (run,) = api.post("/flow_runs/filter", flow_runs={"tags": {"all_": ["unstarted"]}})
    assert run["state_type"] in ("CANCELLED", "CANCELLING")


@algo
def only_runs(store: Any) -> None:
    """A program over a store."""
    raise AssertionError("not to be run")


class Clever(LitAgent[Any]):
    """An agent without a name in a module."""


def test_an_agent_is_found_by_the_name_that_it_has_in_its_module():
    assert find_path(AGENT) == "examples.calculator.agent:calculator"
    with pytest.raises(ConfigError, match="agent Clever cannot be imported by name"):
        find_path(Clever())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"algorithm": only_runs}, "with only run"),
        ({"algorithm": None}, "no algorithm"),
        ({"algorithm": Baseline()}, "Baseline scores a policy; give its model"),
        ({"tracer": DummyTracer()}, "tracer of the Trainer would have no effect"),
        ({"max_rollouts": 3}, "max_rollouts of the Trainer would have no effect"),
    ],
)
def test_what_the_pipeline_cannot_do_is_refused(
    tmp_path: Path, parts: dict[str, Any], message: str
):
    strategy = PrefectExecutionStrategy(run_id="refused", ledger=str(tmp_path))
    trainer = Trainer(**{"algorithm": small_verl(), "strategy": strategy, **parts})
    with pytest.raises(ConfigError, match=message):
        trainer.fit(AGENT, rows("train", 20))
    assert not list(tmp_path.iterdir())


def test_settings_of_the_trainer_are_not_given_to_the_strategy():
    with pytest.raises(ConfigError, match="train_data: given to Trainer and fit"):
        PrefectExecutionStrategy(train_data="x.jsonl")


def test_a_strategy_has_no_runners_of_its_own():
    with pytest.raises(ConfigError, match="n_runners is 2"):
        Trainer(strategy=PrefectExecutionStrategy(), n_runners=2)


def test_a_deployment_that_is_not_there_is_named(api: Api, engine: ModelServer, tmp_path: Path):
    trainer = trainer_of(
        small_verl(), tmp_path, engine.url, "nowhere", deployment="training-run/nowhere"
    )
    with pytest.raises(ConfigError, match="no deployment training-run/nowhere: `agl deploy`"):
        trainer.fit(AGENT, rows("train", 20))
