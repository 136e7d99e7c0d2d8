"""Advantages over the right units, against plain formulas and VERL's own functions."""

import statistics
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest

from agl_core.algorithm.verl.advantage import estimate
from agl_core.algorithm.verl.batch import RowBatch, read_rows
from agl_core.algorithm.verl.config import compose
from agl_core.algorithm.verl.estimators import OUTCOME
from agl_core.algorithm.verl.overrides import normalise
from agl_core.errors import TrainerError
from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.filters import EQUAL_TOLERANCE
from tests.agl_core.algorithm.verl.conftest import SETTINGS, UNEVEN, make_rows


def algorithm(estimator: str, **settings: object):
    keys = {f"algorithm.{name}": value for name, value in settings.items()}
    overrides = normalise(SETTINGS) | keys | {"algorithm.adv_estimator": estimator}
    return compose(overrides).algorithm


def per_row(values: np.ndarray, batch: RowBatch) -> list[float]:
    """The advantage of each row's tokens with loss weight, which must be one number."""
    ends = np.cumsum(batch.response_lengths)[:-1]
    found = []
    for part, mask in zip(np.split(values, ends), np.split(batch.response_mask, ends), strict=True):
        assert (part[mask == 0] == 0).all()
        weighted = set(part[mask == 1].tolist())
        assert len(weighted) == 1
        found.append(weighted.pop())
    return found


def rewards_of(rows: list[tuple[int, int, float]]) -> dict[int, tuple[int, float]]:
    return {index: (group, reward) for index, group, reward in rows}


def others(rewards: dict[int, tuple[int, float]], index: int) -> list[float]:
    return [r for i, (g, r) in rewards.items() if g == rewards[index][0] and i != index]


def grpo(rewards: dict[int, tuple[int, float]], index: int) -> float:
    peers = [*others(rewards, index), rewards[index][1]]
    return (rewards[index][1] - statistics.mean(peers)) / (statistics.stdev(peers) + 1e-6)


def dr_grpo(rewards: dict[int, tuple[int, float]], index: int) -> float:
    return rewards[index][1] - statistics.mean([*others(rewards, index), rewards[index][1]])


def rloo(rewards: dict[int, tuple[int, float]], index: int) -> float:
    return rewards[index][1] - statistics.mean(others(rewards, index))


def gpg(rewards: dict[int, tuple[int, float]], index: int) -> float:
    scale = len(rewards) / sum(reward != 0 for _, reward in rewards.values())
    return scale * dr_grpo(rewards, index)


@pytest.mark.parametrize("estimator", sorted(OUTCOME))
@pytest.mark.parametrize("reward", [0.3, 0.7, 0.95, 1.0, -2.1])
def test_a_group_of_equal_rewards_weighs_exactly_nothing(estimator: str, reward: float):
    equal = [(index, 0, reward) for index in range(8)]
    near = [(index, 1, reward + index * 1e-8) for index in range(8, 16)]
    different = [(16, 2, 0.25), (17, 2, 0.75), (18, 2, 1.0)]
    batch = read_rows(make_rows([*equal, *near, *different]))
    found = estimate(batch, algorithm(estimator), batch.token_rewards)
    advantages = per_row(found.values, batch)
    assert advantages[:16] == [0.0] * 16
    assert any(advantages[16:])
    assert (found.equal_groups, found.near_equal_groups) == (1, 1)


def test_reinforce_plus_plus_weighs_a_batch_of_one_reward_as_nothing():
    batch = read_rows(make_rows([(0, 0, 0.7), (1, 1, 0.7)]))
    found = estimate(batch, algorithm("reinforce_plus_plus"), batch.token_rewards)
    assert not found.values.any()


def test_rewards_that_differ_by_more_than_the_tolerance_are_compared():
    batch = read_rows(make_rows([(0, 0, 0.7), (1, 0, 0.7 + 3 * EQUAL_TOLERANCE)]))
    found = estimate(batch, algorithm("grpo"), batch.token_rewards)
    low, high = per_row(found.values, batch)
    assert low < 0 < high
    assert (found.equal_groups, found.near_equal_groups) == (0, 0)


@pytest.mark.parametrize(
    ("estimator", "settings", "formula"),
    [
        ("grpo", {}, grpo),
        ("grpo_vectorized", {}, grpo),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, dr_grpo),
        ("rloo", {}, rloo),
        ("rloo_vectorized", {}, rloo),
        ("gpg", {}, gpg),
    ],
)
def test_one_value_of_each_rollout_is_compared_however_many_rows_it_has(
    estimator, settings, formula
):
    batch = read_rows(make_rows(UNEVEN))
    found = estimate(batch, algorithm(estimator, **settings), batch.token_rewards)
    rewards = rewards_of(UNEVEN)
    expected = [formula(rewards, index) for index, _, _ in UNEVEN]
    assert found.values.dtype == np.float32
    assert found.has_peers.all()
    assert per_row(found.values, batch) == pytest.approx(expected, abs=1e-6)


def test_opo_weights_its_baseline_by_the_tokens_of_whole_rollouts():
    batch = read_rows(make_rows(UNEVEN))
    found = estimate(batch, algorithm("opo"), batch.token_rewards)
    rewards, lengths = rewards_of(UNEVEN), defaultdict(int)
    for (index, _, _), count in zip(UNEVEN, batch.weighted_tokens(), strict=True):
        lengths[index] += count
    expected = []
    for _, group, reward in UNEVEN:
        peers = [i for i, (g, _) in rewards.items() if g == group]
        baseline = sum(lengths[i] * rewards[i][1] for i in peers) / sum(lengths[i] for i in peers)
        expected.append(reward - baseline)
    assert per_row(found.values, batch) == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_credits_only_the_best_of_a_group():
    batch = read_rows(make_rows(UNEVEN))
    settings = algorithm("grpo_passk", norm_adv_by_std_in_grpo=False)
    found = per_row(estimate(batch, settings, batch.token_rewards).values, batch)
    assert found == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5])


def test_reinforce_plus_plus_baseline_whitens_over_all_tokens():
    batch = read_rows(make_rows(UNEVEN))
    found = estimate(batch, algorithm("reinforce_plus_plus_baseline"), batch.token_rewards)
    rewards = rewards_of(UNEVEN)
    tokens = [
        dr_grpo(rewards, index)
        for (index, _, _), count in zip(UNEVEN, batch.weighted_tokens(), strict=True)
        for _ in range(count)
    ]
    scale = np.sqrt(np.var(tokens, ddof=1) + 1e-8)
    expected = [(dr_grpo(rewards, index) - np.mean(tokens)) / scale for index, _, _ in UNEVEN]
    assert per_row(found.values, batch) == pytest.approx(expected, abs=1e-5)


def test_reinforce_plus_plus_takes_the_discounted_rewards_of_whole_rows():
    rows = make_rows(UNEVEN).to_pylist()
    rows[0]["token_rewards"] = [0.5] * len(rows[0]["token_rewards"])
    batch = read_rows(pa.Table.from_pylist(rows, schema=BATCH_ROWS))
    found = estimate(batch, algorithm("reinforce_plus_plus", gamma=0.5), batch.token_rewards)
    returns, weighted = [], []
    for row in rows:
        running, part = 0.0, []
        for reward, mask in zip(
            reversed(row["token_rewards"]), reversed(row["response_mask"]), strict=True
        ):
            running = reward + 0.5 * running if mask else running
            part.append(running if mask else 0.0)
        returns += reversed(part)
        weighted += row["response_mask"]
    sampled = [r for r, m in zip(returns, weighted, strict=True) if m]
    scale = np.sqrt(np.var(sampled, ddof=1) + 1e-8)
    expected = [(r - np.mean(sampled)) / scale * m for r, m in zip(returns, weighted, strict=True)]
    assert found.values.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", sorted(OUTCOME - {"grpo_passk"}))
def test_the_order_of_rows_does_not_matter(estimator: str):
    table = make_rows(UNEVEN)
    order = [6, 2, 4, 0, 5, 3, 1]
    straight = read_rows(table)
    shuffled = read_rows(table.take(order))
    settings = algorithm(estimator)
    expected = per_row(estimate(straight, settings, straight.token_rewards).values, straight)
    found = per_row(estimate(shuffled, settings, shuffled.token_rewards).values, shuffled)
    assert found == pytest.approx([expected[k] for k in order], abs=1e-6)


def test_a_penalty_on_tokens_counts_in_the_value_of_the_rollout():
    batch = read_rows(make_rows(UNEVEN))
    penalty = np.linspace(0, 0.1, len(batch.token_rewards), dtype=np.float32)
    settings = algorithm("rloo")
    found = estimate(batch, settings, batch.token_rewards - penalty)
    rewards = rewards_of(UNEVEN)
    ends = np.cumsum(batch.response_lengths)[:-1]
    for (index, _, _), part in zip(UNEVEN, np.split(penalty, ends), strict=True):
        group, reward = rewards[index]
        rewards[index] = (group, reward - float(part.sum()))
    expected = [rloo(rewards, index) for index, _, _ in UNEVEN]
    assert per_row(found.values, batch) == pytest.approx(expected, abs=1e-5)


def test_a_group_of_one_is_refused():
    batch = read_rows(make_rows([*UNEVEN[:3], (2, 1, 1.0), (2, 1, 1.0)]))
    with pytest.raises(TrainerError, match="group 1 has one rollout"):
        estimate(batch, algorithm("grpo"), batch.token_rewards)


CALLS = [
    (0, 0, 0.0),
    (0, 0, 1.0),
    (0, 0, 9.0),  # the third call, which no other rollout made
    (1, 0, 0.5),
    (1, 0, 0.25),
    (2, 0, 0.25),
]
"""Rewards of calls: three, two and one of three rollouts."""


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_call_k_is_compared_with_call_k_of_the_others(estimator: str):
    batch = read_rows(make_rows(CALLS))
    found = estimate(batch, algorithm(estimator), batch.token_rewards, by_step=True)
    assert found.has_peers.tolist() == [True, True, False, True, True, True]
    first = {0: (0, 0.0), 1: (0, 0.5), 2: (0, 0.25)}
    second = {0: (0, 1.0), 1: (0, 0.25)}
    formula = {"grpo": grpo, "rloo": rloo}[estimator]
    expected = [
        formula(first, 0),
        formula(second, 0),
        0.0,
        formula(first, 1),
        formula(second, 1),
        formula(first, 2),
    ]
    assert per_row(found.values, batch) == pytest.approx(expected, abs=1e-6)


def test_a_step_needs_as_many_rollouts_as_the_run_asks_for():
    batch = read_rows(make_rows(CALLS))
    found = estimate(batch, algorithm("grpo"), batch.token_rewards, by_step=True, min_group_size=3)
    assert found.has_peers.tolist() == [True, False, False, True, False, True]
