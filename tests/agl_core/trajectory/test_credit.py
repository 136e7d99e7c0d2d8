import pyarrow as pa
import pytest
from hypothesis import given, settings

from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.credit import shuffle_rewards
from agl_core.trajectory.settings import BatchSettings
from tests.agl_core.trajectory.conversations import rollouts
from tests.builders import make_triplets

ROWS = [{"index": index // 2, "group": 0, "reward": float(index // 2)} for index in range(40)]


def entry(value: float, name: str = "primary", **flags: bool) -> dict:
    return {"name": name, "value": value, "primary": True, "final": False, "matched": True} | flags


def two_calls(
    first: list[dict], last: list[dict], reward: float = 1.0, index: int = 0
) -> list[dict]:
    """One rollout whose second call continues the first."""
    return [
        {"index": index, "group": 0, "reward": reward, "rewards": first},
        {
            "index": index,
            "group": 0,
            "call_index": 1,
            "prompt_ids": [1, 2, 3, 4, 5],
            "reward": reward,
            "rewards": last,
        },
    ]


EMITTED = two_calls([entry(0.25)], [entry(1.0, final=True)])


def credited(calls: list[dict], level: str = "transition", **overrides: object) -> list[dict]:
    rules = BatchSettings.model_validate(
        {
            "level": level,
            "max_prompt_length": 9,
            "max_response_length": 9,
            "min_group_size": 1,
            "temperature": 1.0,
            **overrides,
        }
    )
    return build_batch(make_triplets(*calls), rules).rows.to_pylist()


@pytest.mark.parametrize(
    ("overrides", "rewards", "rollout"),
    [
        ({"credit": "final"}, [1.0, 1.0], 1.0),
        ({"credit": "per_call"}, [0.25, 1.0], 1.25),
        ({"credit": "discounted", "discount": 0.5}, [0.75, 1.0], 0.75),
        ({"credit": "sum"}, [1.25, 1.25], 1.25),
    ],
)
def test_each_assignment_gives_its_rewards_and_one_value_a_rollout(
    overrides: dict, rewards: list[float], rollout: float
):
    rows = credited(EMITTED, **overrides)
    assert [row["reward"] for row in rows] == rewards
    assert [row["rollout_reward"] for row in rows] == [rollout, rollout]
    assert [row["token_rewards"] for row in rows] == [[0.0, rewards[0]], [0.0, rewards[1]]]


@pytest.mark.parametrize(
    ("credit", "token_rewards"),
    [("final", [0, 0, 0, 0, 1.0]), ("per_call", [0, 0.25, 0, 0, 1.0])],
)
def test_rewards_of_a_trajectory_are_on_sampled_tokens(credit: str, token_rewards: list[float]):
    (row,) = credited(EMITTED, level="trajectory", credit=credit)
    assert row["response_ids"] == [3, 4, 5, 3, 4]
    assert row["token_rewards"] == token_rewards
    assert row["reward"] == sum(token_rewards)


def test_a_call_without_a_reward_has_the_sum_of_none():
    rows = credited(two_calls([], [entry(1.0, final=True)]), credit="per_call")
    assert [row["reward"] for row in rows] == [0.0, 1.0]


def test_a_reward_of_no_call_counts_in_the_sum_alone():
    calls = two_calls([entry(0.5, matched=False)], [entry(1.0, final=True)])
    assert credited(calls, credit="sum")[0]["reward"] == 1.5
    assert [row["reward"] for row in credited(calls, credit="per_call")] == [0.0, 1.0]


def test_dimensions_are_weighted():
    last = [
        entry(1.0, "accuracy", final=True),
        entry(0.5, "format", final=True, primary=False),
        entry(9.0, "length", final=True, primary=False),
    ]
    calls = two_calls([], last)
    weights = {"accuracy": 2.0, "format": 0.5}
    assert credited(calls, reward_weights=weights)[0]["reward"] == 2.25
    assert credited(calls)[0]["reward"] == 1.0, "the final one of the one rule"
    assert credited(calls, credit="sum")[0]["reward"] == 1.0, "primary dimensions alone"


def test_a_rollout_without_a_weighted_dimension_is_dropped_not_given_0():
    rows = credited(two_calls([], [entry(1.0, final=True)]), reward_weights={"accuracy": 1.0})
    assert [row["drop_reason"] for row in rows] == ["unusable_reward"] * 2


def test_a_reward_that_is_not_finite_drops_its_rollout_where_it_counts():
    calls = two_calls([entry(float("nan"))], [entry(1.0, final=True)])
    assert credited(calls, credit="sum")[0]["drop_reason"] == "unusable_reward"
    assert credited(calls, credit="final")[0]["drop_reason"] is None


def test_a_reward_stays_with_its_call_where_the_response_is_cut():
    right = {"response_truncation": "right", "max_response_length": 4, "level": "trajectory"}
    (row,) = credited(EMITTED, credit="per_call", **right)
    assert row["token_rewards"] == [0, 0.25, 0, 1.0]
    (row,) = credited(EMITTED, credit="per_call", **right | {"max_response_length": 3})
    assert (row["token_rewards"], row["reward"]) == ([0, 0.25, 0], 0.25), "the last call is cut off"
    (row,) = credited(EMITTED, **right | {"max_response_length": 3})
    assert row["token_rewards"] == [0, 1.0, 0], "the final one is on the last token that is left"
    assert row["truncated"] == "response_right"


def test_a_reward_is_gone_with_its_call_where_the_response_is_cut_at_its_left():
    left = {"response_truncation": "left", "max_response_length": 3, "level": "trajectory"}
    other = two_calls([], [entry(0.5, final=True)], reward=0.5, index=1)
    rows = credited([*other, *EMITTED], credit="per_call", **left)
    assert [row["token_rewards"] for row in rows] == [[0, 0, 0.5], [0, 0, 1.0]]
    assert [row["reward"] for row in rows] == [0.5, 1.0]
    assert [row["rollout_reward"] for row in rows] == [0.5, 1.25], "statistics know of both calls"


def test_shuffled_rewards_are_the_same_rewards_dealt_to_other_rollouts():
    before = make_triplets(*ROWS)
    after = shuffle_rewards(before, seed=1)
    assert sorted(after["reward"].to_pylist()) == sorted(before["reward"].to_pylist())
    assert after["reward"].to_pylist() != before["reward"].to_pylist()
    assert after.drop(["reward"]).equals(before.drop(["reward"]))


def test_every_call_of_a_rollout_gets_the_same_dealt_reward():
    rewards = shuffle_rewards(make_triplets(*ROWS), seed=1)["reward"].to_pylist()
    assert rewards[::2] == rewards[1::2]


def test_the_same_seed_deals_the_same():
    first, second = (shuffle_rewards(make_triplets(*ROWS), seed=7) for _ in range(2))
    assert first.equals(second)


@settings(max_examples=50, deadline=None)
@given(rollouts())
def test_the_rewards_of_a_rollout_are_dealt_together(triplets: list[dict]):
    before = make_triplets(*triplets)
    after = shuffle_rewards(before, seed=3)
    assert sorted(_by_rollout(before)) == sorted(_by_rollout(after))
    assert after.drop(["reward", "rewards"]).equals(before.drop(["reward", "rewards"]))
    for rows in _rollouts(after).values():
        assert rows[-1]["rewards"][-1]["final"], "the final reward is on the last call"


def _rollouts(triplets: pa.Table) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for row in triplets.to_pylist():
        found.setdefault(row["index"], []).append(row)
    return found


def _by_rollout(triplets: pa.Table) -> list[tuple]:
    return [
        (rows[0]["reward"], *(tuple(e.items()) for row in rows for e in row["rewards"]))
        for rows in _rollouts(triplets).values()
    ]
