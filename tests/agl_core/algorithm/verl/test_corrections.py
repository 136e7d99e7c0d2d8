"""KL, entropy, rollout correction, losses and the critic in a whole update, on known numbers."""

import asyncio
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from agl_core.algorithm.iterative import Experience
from agl_core.algorithm.verl.algorithm import VERL, VERLState
from agl_core.algorithm.verl.batch import RowBatch, read_rows
from agl_core.algorithm.verl.config import compose
from agl_core.algorithm.verl.correction import correct
from agl_core.algorithm.verl.estimators import LOSSES
from agl_core.algorithm.verl.kl import penalise
from agl_core.algorithm.verl.overrides import normalise
from agl_core.algorithm.verl.settings import batch_settings
from agl_core.algorithm.verl.update import learn
from agl_core.errors import TrainerError
from agl_core.types.training import PolicyRef
from tests.agl_core.algorithm.verl.conftest import SETTINGS, UNEVEN, LocalArtifacts, make_rows

ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."


def configured(**settings: Any):
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return compose(normalise(SETTINGS) | named)


@pytest.fixture
def batch() -> RowBatch:
    return read_rows(make_rows(UNEVEN))


def rows_of(values: np.ndarray, batch: RowBatch) -> list[np.ndarray]:
    return np.split(values, np.cumsum(batch.response_lengths)[:-1])


@pytest.fixture
def update_with(worker_with):
    """Runs one iteration with settings of the actor, on a worker without critic or reference."""

    def run(batch: RowBatch, config: Any, **actor: Any):
        worker = worker_with(**actor)
        settings = batch_settings(config, 2)
        return learn(worker, batch, config, settings, step=0, kl_coefficient=0.001)

    return run


def test_the_penalty_is_the_coefficient_times_the_log_ratio_of_sampled_tokens(batch: RowBatch):
    log_probs = np.linspace(-2, -1, len(batch.response_ids), dtype=np.float32)
    reference = np.full_like(log_probs, -1.5)
    algorithm = configured().algorithm
    found = penalise(batch, log_probs, reference, algorithm, 0.1)
    ratio = (log_probs - reference) * batch.response_mask
    assert found.token_rewards == pytest.approx(batch.token_rewards - 0.1 * ratio, abs=1e-6)
    means = [
        part.sum() / mask.sum()
        for part, mask in zip(
            rows_of(ratio, batch), rows_of(batch.response_mask, batch), strict=True
        )
    ]
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(np.mean(means), abs=1e-6)
    assert found.metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert found.coefficient == 0.1


def test_an_adaptive_coefficient_follows_the_target(batch: RowBatch):
    log_probs = np.full(len(batch.response_ids), -1.0, dtype=np.float32)
    settings = {
        "algorithm__kl_ctrl__type": "adaptive",
        "algorithm__kl_ctrl__target_kl": 0.4,
        "algorithm__kl_ctrl__horizon": 70,
    }
    algorithm = configured(**settings).algorithm
    found = penalise(batch, log_probs, log_probs - 0.5, algorithm, 0.1)
    assert found.coefficient == pytest.approx(0.1 * (1 + 0.2 * len(batch) / 70))
    found = penalise(batch, log_probs, log_probs - 0.38, algorithm, 0.1)
    assert found.coefficient == pytest.approx(0.1 * (1 - 0.05 * len(batch) / 70), rel=1e-5)


def test_importance_weights_are_truncated_ratios(batch: RowBatch):
    difference = np.linspace(-1.5, 1.5, len(batch.response_ids), dtype=np.float32)
    assert batch.rollout_logprobs is not None
    old = batch.rollout_logprobs + difference
    settings = configured(**{CORRECTION + "rollout_is": "token"}).algorithm.rollout_correction
    found = correct(batch, old, settings)
    assert found.weights is not None
    expected = np.minimum(np.exp(difference), 2.0) * batch.response_mask
    assert found.weights == pytest.approx(expected, rel=1e-5)
    assert np.array_equal(found.response_mask, batch.response_mask)
    weighted = batch.response_mask > 0
    mean = expected[weighted].mean()
    assert found.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(mean, rel=1e-5)
    kl = -difference[weighted].mean()
    assert found.metrics["rollout_corr/kl"] == pytest.approx(kl, abs=1e-5)


def test_weights_of_sequences_are_products_over_their_tokens(batch: RowBatch):
    difference = np.linspace(-0.3, 0.3, len(batch.response_ids), dtype=np.float32)
    assert batch.rollout_logprobs is not None
    settings = configured(
        **{CORRECTION + "rollout_is": "sequence", CORRECTION + "rollout_is_threshold": 1.2}
    ).algorithm.rollout_correction
    found = correct(batch, batch.rollout_logprobs + difference, settings)
    assert found.weights is not None
    for weights, ratio, mask in zip(
        rows_of(found.weights, batch),
        rows_of(difference, batch),
        rows_of(batch.response_mask, batch),
        strict=True,
    ):
        product = min(1.2, math.exp(float((ratio * mask).sum())))
        assert weights == pytest.approx(product * mask, rel=1e-5)


def test_tokens_outside_the_thresholds_are_rejected(batch: RowBatch):
    difference = np.linspace(-1.5, 1.5, len(batch.response_ids), dtype=np.float32)
    assert batch.rollout_logprobs is not None
    settings = configured(
        **{CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": "0.5_2.0"}
    ).algorithm.rollout_correction
    found = correct(batch, batch.rollout_logprobs + difference, settings)
    kept = (np.abs(difference) <= math.log(2)) * batch.response_mask
    assert found.weights is None
    assert found.response_mask.tolist() == kept.tolist()


def test_a_batch_without_recorded_log_probs_cannot_be_corrected():
    batch = read_rows(make_rows(UNEVEN, logprob=None))
    settings = configured(**{CORRECTION + "rollout_is": "token"}).algorithm.rollout_correction
    with pytest.raises(TrainerError, match="without recorded log-probs"):
        correct(batch, np.zeros(len(batch.response_ids), np.float32), settings)


def test_importance_weights_scale_the_loss(update_with, worker, batch: RowBatch):
    old = worker.log_probs(batch, 1.0).values
    batch = replace(batch, rollout_logprobs=old - np.float32(math.log(1.5)))
    plain = update_with(batch, configured())
    config = configured(**{CORRECTION + "rollout_is": "token"})
    worker.load_checkpoint(worker.start)
    corrected = update_with(batch, config)
    losses = [update.steps[0]["actor/pg_loss"] for update in (plain, corrected)]
    assert losses[1] == pytest.approx(1.5 * losses[0], abs=1e-6)
    assert corrected.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.5, rel=1e-4)


def test_rejected_rows_do_not_train_and_say_why(update_with, worker, batch: RowBatch):
    old = worker.log_probs(batch, 1.0).values
    far = np.repeat([0, 1, 0, 0, 0, 0, 0], batch.response_lengths).astype(np.float32)
    batch = replace(batch, rollout_logprobs=old - 3 * far)
    config = configured(
        **{CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": 2.0}
    )
    update = update_with(batch, config)
    reasons = update.rows["drop_reason"].to_pylist()
    assert reasons == [None, "rejected", None, None, None, None, None]
    assert update.metrics["batch/dropped_rows/rejected"] == 1
    assert update.metrics["batch/num_weighted_tokens"] == (
        batch.response_mask.sum() - batch.weighted_tokens()[1]
    )


def test_an_update_whose_rows_are_all_rejected_is_an_error(update_with, worker, batch: RowBatch):
    old = worker.log_probs(batch, 1.0).values
    config = configured(
        **{CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": 2.0}
    )
    with pytest.raises(TrainerError, match=r"no token .* loss weight; rows: {'rejected': 7}"):
        update_with(replace(batch, rollout_logprobs=old - 3), config)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_an_update_whose_rows_are_all_rejected_may_be_skipped(
    update_with, worker, batch: RowBatch, estimator: str
):
    old = worker.log_probs(batch, 1.0).values
    settings = {
        CORRECTION + "rollout_rs": "token_k1",
        CORRECTION + "rollout_rs_threshold": 2.0,
        "agentlightning__filter__on_empty": "skip",
        "algorithm__adv_estimator": estimator,
    }
    update = update_with(replace(batch, rollout_logprobs=old - 3), configured(**settings))
    assert update.steps == []
    assert update.metrics["batch/dropped_rows/rejected"] == len(batch) == 7
    assert set(update.rows["drop_reason"].to_pylist()) == {"rejected"}


def test_rows_without_a_peer_at_their_step_do_not_train(update_with):
    calls = [(0, 0, 0.0), (0, 0, 1.0), (0, 0, 9.0), (1, 0, 0.5), (1, 0, 0.25)]
    batch = read_rows(make_rows(calls))
    config = configured(agentlightning__credit__assignment="per_call")
    update = update_with(batch, config)
    assert update.rows["drop_reason"].to_pylist() == [None, None, "no_peer_at_step", None, None]
    assert set(update.rows["advantages"][2].as_py()) == {0.0}
    assert update.metrics["batch/dropped_rows/no_peer_at_step"] == 1


def test_entropy_lowers_the_loss_by_its_coefficient(update_with, worker, batch: RowBatch):
    entropy = worker.log_probs(batch, 1.0).entropy
    update = update_with(batch, configured(), entropy_coeff=0.1)
    (step,) = update.steps
    assert step["actor/entropy_loss"] == pytest.approx(entropy, abs=1e-5)
    assert step["actor/loss"] == pytest.approx(step["actor/pg_loss"] - 0.1 * entropy, abs=1e-5)


@pytest.mark.parametrize("mode", sorted(LOSSES))
def test_every_accepted_loss_takes_a_step(update_with, worker, batch: RowBatch, mode: str):
    settings = {"policy_loss.loss_mode": mode}
    settings |= {"policy_loss.dro_beta": 0.1} if mode == "dro" else {}
    settings |= {"ppo_micro_batch_size_per_gpu": 16} if mode == "geo_mean" else {}
    before = worker._actor.weights()["model.norm.weight"].clone()
    (step,) = update_with(batch, configured(), **settings).steps
    assert math.isfinite(step["actor/pg_loss"])
    assert step["actor/grad_norm"] > 0
    assert not torch.equal(before, worker._actor.weights()["model.norm.weight"])


def test_a_mini_batch_that_geo_mean_would_split_is_refused(update_with, batch: RowBatch):
    mode = {"policy_loss.loss_mode": "geo_mean", "ppo_micro_batch_size_per_gpu": 8}
    many = read_rows(make_rows([(k, k % 2, float(k % 3)) for k in range(9)]))
    with pytest.raises(TrainerError, match="in one forward pass"):
        update_with(many, configured(), **mode)


def state_of(verl: VERL, policy: Path) -> VERLState:
    base = PolicyRef(version="v000000", weights_digest="sha256:0", path=str(policy))
    return verl.start(base, range(10), None)


def metrics_of(artifacts: LocalArtifacts) -> dict[tuple[int | None, str], float]:
    table = artifacts.tables["update_metrics"].to_pylist()
    return {(row["step"], row["name"]): row["value"] for row in table}


def experience(artifacts: LocalArtifacts, table: pa.Table | None = None) -> Experience:
    return Experience(lambda: make_rows(UNEVEN) if table is None else table, artifacts)


async def test_the_reference_stays_the_policy_that_training_started_from(tiny_policy, tmp_path):
    artifacts = LocalArtifacts(tmp_path)
    overrides = normalise(SETTINGS) | {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.05,
        ACTOR + "use_kl_loss": True,
        ACTOR + "kl_loss_coef": 0.5,
        ACTOR + "kl_loss_type": "k2",
        ACTOR + "ppo_epochs": 2,
    }
    verl = VERL(overrides)
    learned = await verl.learn(state_of(verl, tiny_policy), experience(artifacts))
    found = metrics_of(artifacts)
    assert found[(None, "actor/reward_kl_penalty")] == 0
    assert found[(0, "actor/kl_loss")] == 0
    assert found[(1, "actor/kl_loss")] > 0
    assert found[(1, "actor/loss")] == pytest.approx(
        found[(1, "actor/pg_loss")] + 0.5 * found[(1, "actor/kl_loss")], abs=1e-6
    )
    exported = await verl.export(learned, artifacts)
    verl.close()
    assert exported.kl_coefficient is not None
    assert exported.kl_coefficient < 0.05

    resumed = VERL(overrides)  # builds policy and reference again, from two folders
    state = VERLState.model_validate_json(exported.model_dump_json())
    final = await resumed.learn(state, experience(artifacts))
    resumed.close()
    found = metrics_of(artifacts)
    assert found[(None, "actor/reward_kl_penalty")] != 0
    assert found[(None, "actor/reward_kl_penalty_coeff")] == exported.kl_coefficient
    assert final.kl_coefficient != exported.kl_coefficient


async def test_bypass_mode_takes_the_log_probs_of_the_rollouts(tiny_policy, tmp_path):
    artifacts = LocalArtifacts(tmp_path)
    overrides = normalise(SETTINGS) | {CORRECTION + "bypass_mode": True}
    verl = VERL(overrides)
    await verl.learn(state_of(verl, tiny_policy), experience(artifacts))
    verl.close()
    rows = artifacts.tables["update_rows"]
    assert rows["old_log_probs"].to_pylist() == make_rows(UNEVEN)["rollout_logprobs"].to_pylist()
    found = metrics_of(artifacts)
    assert (0, "actor/rollout_corr/kl") in found or (0, "rollout_corr/kl") in found
    assert (None, "actor/entropy") not in found


GAE = normalise(SETTINGS) | {
    "algorithm.adv_estimator": "gae",
    "critic.optim.lr": 1e-3,
    "critic.ppo_epochs": 2,
}


def go_on(state_file: Path, root: Path, out: Path) -> None:
    """Make the next iteration in this process, and leave its policy, metrics and critic."""
    torch.set_num_threads(1)  # as in the tests
    artifacts = LocalArtifacts(root)
    artifacts._scratches = 100  # names that the first process did not use
    verl = VERL(GAE)
    state = VERLState.model_validate_json(state_file.read_text())

    async def iterate() -> VERLState:
        return await verl.export(await verl.learn(state, experience(artifacts)), artifacts)

    final = asyncio.run(iterate())
    verl.close()
    assert final.policy.folder is not None
    assert final.checkpoint is not None
    policy = load_file(root / final.policy.folder.prefix / "model.safetensors")
    critic = torch.load(
        root / final.checkpoint.prefix / "critic" / "model_world_size_1_rank_0.pt",
        weights_only=False,
    )
    metrics = artifacts.tables["update_metrics"].to_pydict()
    torch.save({"policy": policy, "critic": critic, "metrics": metrics}, out)


def test_a_fresh_process_goes_on_bit_equal_with_policy_and_critic(tiny_policy, tmp_path):
    artifacts = LocalArtifacts(tmp_path / "kept")
    verl = VERL(GAE)

    async def iterate(state: VERLState) -> VERLState:
        return await verl.export(await verl.learn(state, experience(artifacts)), artifacts)

    first = asyncio.run(iterate(state_of(verl, tiny_policy)))
    found = metrics_of(artifacts)
    assert found[(1, "critic/vf_loss")] < found[(0, "critic/vf_loss")]
    assert {(0, "actor/pg_loss"), (None, "critic/vf_explained_var")} < found.keys()
    assert (1, "actor/pg_loss") not in found
    saved = tmp_path / "state.json"
    saved.write_text(first.model_dump_json())
    final = asyncio.run(iterate(first))
    verl.close()
    assert final.policy.folder is not None
    here = load_file(artifacts.root / final.policy.folder.prefix / "model.safetensors")
    assert final.checkpoint is not None
    critic_here = torch.load(
        artifacts.root / final.checkpoint.prefix / "critic" / "model_world_size_1_rank_0.pt",
        weights_only=False,
    )

    code = (
        "import sys; from pathlib import Path\n"
        "from tests.agl_core.algorithm.verl.test_corrections import go_on\n"
        "go_on(*map(Path, sys.argv[1:]))"
    )
    paths = [str(saved), str(artifacts.root), str(tmp_path / "there.pt")]
    result = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    there = torch.load(tmp_path / "there.pt", weights_only=False)
    assert all(torch.equal(here[name], there["policy"][name]) for name in here)
    assert critic_here.keys() == there["critic"].keys()
    for name, tensor in critic_here.items():
        one, other = (getattr(t, "_local_tensor", t) for t in (tensor, there["critic"][name]))
        assert torch.equal(one, other), name
    assert artifacts.tables["update_metrics"].to_pydict() == there["metrics"]


async def test_only_the_critic_learns_while_it_warms_up(tiny_policy, tmp_path):
    artifacts = LocalArtifacts(tmp_path)
    verl = VERL(GAE | {"trainer.critic_warmup": 2})
    learned = await verl.learn(state_of(verl, tiny_policy), experience(artifacts))
    found = metrics_of(artifacts)
    assert (0, "critic/vf_loss") in found
    assert (0, "actor/pg_loss") not in found
    exported = await verl.export(learned, artifacts)
    assert exported.policy.folder is not None
    weights = load_file(artifacts.root / exported.policy.folder.prefix / "model.safetensors")
    start = load_file(tiny_policy / "model.safetensors")
    assert all(torch.equal(weights[name], start[name]) for name in start)
    await verl.learn(exported, experience(artifacts))
    assert (0, "actor/pg_loss") in metrics_of(artifacts)
    verl.close()
