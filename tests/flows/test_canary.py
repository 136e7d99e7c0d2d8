"""One rollout before the first iteration: what it shows, and that nothing uses it."""

import asyncio
from pathlib import Path

import pytest

from agl_core.config import RunConfig
from agl_core.errors import ConfigError
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.serving.launch import ModelServer
from flows.canary import CANARY_SET
from flows.training_run import training_run
from tests.conftest import small_run, train

pytestmark = pytest.mark.usefixtures("prefect_api")


def one_iteration(engine: ModelServer, folder: Path, **changes: object) -> RunConfig:
    settings = {"val_data": None, "preflight": {"canary": True}, **changes}
    config = small_run(engine.url, str(folder), run_id="tried", **settings)
    config.algorithm.config["trainer.total_training_steps"] = 1
    return config


def canary_outcomes(folder: Path) -> list[tuple[int, str]]:
    outcomes = RolloutSet(open_run(str(folder), "tried").iteration(0), CANARY_SET).outcomes()
    return [(row["index"], row["kind"]) for row in outcomes.to_pylist()]


def test_its_rollout_is_kept_apart_and_not_repeated(engine: ModelServer, tmp_path: Path):
    run = train(one_iteration(engine, tmp_path))
    assert canary_outcomes(tmp_path) == [(0, "succeeded")]
    (manifest,) = run.manifests()
    assert manifest.coverage.expected == manifest.coverage.trained == 16
    trained = RolloutSet(run.iteration(0), "train").outcomes()
    assert manifest.cost.model_calls == sum(trained["num_calls"].to_pylist())
    assert any(f"/rollouts/{CANARY_SET}/chunks/" in file.key for file in manifest.files)
    assert verify_run(run) == []
    train(one_iteration(engine, tmp_path))
    assert canary_outcomes(tmp_path) == [(0, "succeeded")]


def test_an_agent_that_fails_on_every_row_stops_the_run_with_its_own_error(
    engine: ModelServer, tmp_path: Path
):
    config = one_iteration(engine, tmp_path, agent="tests.flows.canary_agents:never")
    with pytest.raises(ConfigError) as caught:
        asyncio.run(training_run(config))
    assert str(caught.value) == (
        "one rollout was tried in this process before the first iteration, and failed: "
        "agent_error: ValueError: the tool is not installed "
        "(tests/flows/canary_agents.py:12 in never) (preflight.canary: false skips it)"
    )
    assert canary_outcomes(tmp_path) == [(index, "agent_error") for index in range(3)]
    run = open_run(str(tmp_path), "tried")
    assert not run.storage.list(f"{run.iteration(0).prefix}rollouts/train/")
    assert run.iteration(0).record("propose") is None


def test_an_agent_that_fails_now_and_then_may_train(engine: ModelServer, tmp_path: Path):
    config = one_iteration(engine, tmp_path, agent="tests.flows.canary_agents:not_the_first")
    train(config)
    assert canary_outcomes(tmp_path) == [(0, "agent_error"), (1, "succeeded")]
