"""What an algorithm is run with: settings, datasets, adapter."""

from pathlib import Path
from typing import Any

import pytest

from agl_core.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agl_core.algorithm import VERL
from agl_core.algorithm.own_run import names_agent, prepare
from agl_core.config import RolloutSettings
from agl_core.errors import ConfigError
from agl_core.ledger.run import open_run
from agl_core.litagent.decorator import load_agent
from agl_core.store import InMemoryLightningStore
from agl_core.trainer import Trainer
from deployments.cli import read_config
from tests.conftest import CALCULATOR

VERL_CONFIG = {
    "actor_rollout_ref.model.path": str(CALCULATOR / "policy"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "critic.ppo_mini_batch_size": 1,
    "actor_rollout_ref.rollout.n": 2,
    "data.train_batch_size": 1,
    "data.max_response_length": 16,
    "trainer.total_training_steps": 1,
}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"runid": "x"}, "unknown setting 'runid'; did you mean 'run_id'"),
        ({"agent": "a:b"}, r"run\.agent: what is run says that"),
        ({"rollout": {"deployment": "a/b"}}, r"rollout\.deployment: of the pipeline"),
        ({"rollout": {"concurrency": 3}}, r"rollout\.concurrency: of the pipeline"),
        ({"rollout": {"isolation": "process"}}, r"rollout\.isolation"),
        ({"preflight": {"canary": True}}, r"preflight\.canary"),
        ({"max_automatic_starts": 3}, "max_automatic_starts"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(run: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        VERL(VERL_CONFIG, run=run)


def test_a_whole_configuration_may_say_what_its_runners_honour(tmp_path):
    file = read_config(CALCULATOR / "run.yaml", {"ledger": str(tmp_path)})
    config = file.model_copy(update={"rollout": RolloutSettings(concurrency=3)})
    assert VERL(VERL_CONFIG, run=config).run_settings is config
    pool = file.model_copy(update={"rollout": RolloutSettings(deployment="a/b")})
    with pytest.raises(ConfigError, match=r"rollout\.deployment"):
        VERL(VERL_CONFIG, run=pool)


def over_a_store(**options: Any) -> VERL:
    algorithm = VERL(VERL_CONFIG, **options)
    algorithm.set_store(InMemoryLightningStore())
    return algorithm


@pytest.mark.parametrize("rows", [None, []])
async def test_nothing_to_train_on_is_an_error(rows):
    with pytest.raises(ConfigError, match="VERL needs a train_dataset with rows"):
        await over_a_store().run(rows)


async def test_a_row_that_cannot_be_kept_is_named(tmp_path):
    algorithm = over_a_store(run={"ledger": str(tmp_path / "ledger"), "run_id": "r"})
    with pytest.raises(ConfigError, match="row 1 of train_dataset cannot be kept as JSON"):
        await algorithm.run([{"a": 1}, {"a": b"\xff"}])
    assert not open_run(str(tmp_path / "ledger"), "r").exists(), "nothing was written"


@pytest.mark.parametrize(
    ("keys", "given", "seed"),
    [
        ({}, {}, 1),
        ({}, {"seed": 5}, 5),
        ({"data.seed": 0}, {}, 0),
        ({"data.seed": 3}, {"seed": 3}, 3),
    ],
)
def test_the_seed_that_is_recorded_is_the_one_that_is_used(
    keys: dict[str, int], given: dict[str, int], seed: int, tmp_path: Path
):
    ledger = str(tmp_path / "ledger")
    algorithm = VERL(VERL_CONFIG | keys, run={"ledger": ledger, "run_id": "r", **given})
    algorithm.set_store(InMemoryLightningStore())
    started = prepare(algorithm, [{}], None)
    assert open_run(ledger, "r").record().config.seed == seed
    assert started.start_state.seed == algorithm.seed == seed


def test_a_seed_that_is_set_after_the_algorithm_was_made_is_refused(tmp_path: Path):
    algorithm = over_a_store()
    algorithm.run_settings = {"ledger": str(tmp_path / "ledger"), "run_id": "r", "seed": 5}
    with pytest.raises(ConfigError, match=r"settings is 5, and the algorithm was made with 1"):
        prepare(algorithm, [{}], None)
    assert not (tmp_path / "ledger").exists()


def test_a_configuration_of_another_algorithm_or_data_is_refused(tmp_path: Path):
    file = read_config(CALCULATOR / "run.yaml", {"ledger": str(tmp_path / "ledger")})
    keys = file.algorithm.config
    later = VERL(keys)
    later.run_settings = file.model_copy(update={"seed": 9})
    for algorithm, said in [
        (VERL(VERL_CONFIG, run=file), "algorithm of the run's configuration is"),
        (VERL(keys, 3, run=file), "min_group_size of the run's configuration is"),
        (later, "seed of the run's configuration is 9, and the algorithm was made with 1"),
        (VERL(keys, file.min_group_size, run=file), "val_dataset has no rows: give both"),
    ]:
        algorithm.set_store(InMemoryLightningStore())
        with pytest.raises(ConfigError, match=said):
            prepare(algorithm, [{}], None)
    assert not (tmp_path / "ledger").exists()


def test_a_configuration_of_another_agent_than_the_trainers_is_refused(tmp_path: Path):
    file = read_config(CALCULATOR / "run.yaml", {"ledger": str(tmp_path / "ledger")})
    algorithm = VERL(file.algorithm.config, file.min_group_size, run=file)
    trainer = Trainer(algorithm=algorithm)
    algorithm.set_trainer(trainer)
    trainer.agent = load_agent("examples.word_problems.agent:word_problem")
    with pytest.raises(ConfigError, match=r"agent .* is examples\.calculator\.agent:calculator"):
        prepare(algorithm, [{}], [{}])
    assert not (tmp_path / "ledger").exists()
    assert names_agent(file.agent, load_agent(file.agent))
    assert not names_agent("no_such_package.agent:calculator", load_agent(file.agent))


async def test_an_adapter_whose_settings_would_be_ignored_is_refused():
    adapter = TracerTraceToTriplet(agent_match="write")
    algorithm = over_a_store()
    algorithm.set_adapter(adapter)
    with pytest.raises(ConfigError, match="TracerTraceToTriplet with settings of its own"):
        await algorithm.run([{}])


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
async def test_adapters_that_ask_for_all_calls_are_taken(adapter, tmp_path):
    serving = {"url": "http://127.0.0.1:1"}
    algorithm = over_a_store(run={"ledger": str(tmp_path), "serving": serving})
    algorithm.set_adapter(adapter)
    with pytest.raises(ConnectionError, match="does not answer"):  # the next thing that is checked
        await algorithm.run([{}])


async def test_a_run_needs_a_store_before_it_writes_anything(tmp_path):
    algorithm = VERL(VERL_CONFIG, run={"ledger": str(tmp_path / "ledger"), "run_id": "r"})
    with pytest.raises(ValueError, match="no store is set"):
        await algorithm.run([{}, {}])
    assert not (tmp_path / "ledger").exists()
