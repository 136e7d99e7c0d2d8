"""The calculator agent learns through the whole chain, and only from its reward."""

import math
from pathlib import Path

import pyarrow.compute as pc
import pytest

from agl_core.config import RunConfig
from agl_core.ledger import files
from agl_core.ledger.run import open_run
from agl_core.ledger.tables import UPDATE_METRICS
from agl_core.plot import validation_by_version
from agl_core.serving.launch import ModelServer
from deployments.cli import read_config
from tests.conftest import CALCULATOR, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.timeout(1800),  # ten minutes were too few on a machine with much else to do
]


def calculator_run(engine: ModelServer, folder: Path, seed: int, **verl: object) -> RunConfig:
    """The demo's run, scored on all 64 validation rows, before and after."""
    config = read_config(CALCULATOR / "run.yaml", {"ledger": str(folder), "run_id": f"seed-{seed}"})
    settings = config.algorithm.config | {
        "data.val_max_samples": -1,
        "trainer.test_freq": 10,
        **verl,
    }
    values = config.model_dump() | {
        "seed": seed,
        "algorithm": {"type": "verl", "config": settings},
        "serving": {"url": engine.url},
    }
    return RunConfig.model_validate(values)


def scores(config: RunConfig) -> tuple[list[float], list[float]]:
    """Run to the end; return mean reward and tool use on the validation set, before and after."""
    scored = validation_by_version(train(config).manifests())
    assert list(scored) == ["v000000", "v000010"]
    assert all(summary.expected == summary.rewarded == 64 for summary in scored.values())
    rewards = [summary.mean_reward or 0.0 for summary in scored.values()]
    return rewards, [summary.annotations["calculator.tool_used"] for summary in scored.values()]


@pytest.mark.parametrize(
    ("seed", "estimator"),
    [
        (1, "grpo"),
        *(
            pytest.param(seed, estimator, marks=pytest.mark.long)
            for seed, estimator in [(1, "rloo"), (2, "grpo"), (2, "rloo"), (3, "grpo"), (3, "rloo")]
        ),
    ],
)
def test_reward_and_tool_use_rise(engine: ModelServer, tmp_path: Path, seed: int, estimator: str):
    config = calculator_run(engine, tmp_path, seed, **{"algorithm.adv_estimator": estimator})
    (before, after), (_, tool_use) = scores(config)
    assert before < 0.5
    assert after >= 0.9
    assert tool_use >= 0.9
    for number, kl in enumerate(kl_by_step(config)):
        assert len(kl) == 4, f"iteration {number} skipped an optimizer step"
        assert all(map(math.isfinite, kl))


def kl_by_step(config: RunConfig) -> list[list[float]]:
    """Each iteration's KL from the policy that sampled, by optimizer step."""
    ledger = open_run(config.ledger, config.run_id)
    found = []
    for number in range(ledger.committed()):
        file = ledger.iteration(number).finished("update").file("update_metrics")
        metrics = files.read_table(ledger.storage, file, UPDATE_METRICS)
        found.append(metrics.filter(pc.equal(metrics["name"], "actor/ppo_kl"))["value"].to_pylist())
    assert len(found) == 10
    return found


def test_nothing_is_learned_from_shuffled_rewards(engine: ModelServer, tmp_path: Path):
    config = calculator_run(engine, tmp_path, seed=1)
    (before, after), _ = scores(config.model_copy(update={"control": "shuffled_rewards"}))
    assert before < 0.5
    assert after < 0.6


@pytest.mark.long
def test_nothing_changes_at_learning_rate_zero(engine: ModelServer, tmp_path: Path):
    config = calculator_run(engine, tmp_path, 1, **{"actor_rollout_ref.actor.optim.lr": 0.0})
    (before, after), _ = scores(config)
    assert before < 0.5
    assert after < 0.6
    manifests = open_run(config.ledger, config.run_id).manifests()
    digests = {manifest.policy_in.weights_digest for manifest in manifests}
    assert digests == {manifests[0].policy_in.weights_digest}
