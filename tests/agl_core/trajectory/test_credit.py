from agl_core.trajectory.credit import shuffle_rewards
from tests.builders import make_triplets

ROWS = [{"index": index // 2, "group": 0, "reward": float(index // 2)} for index in range(40)]


def test_shuffled_rewards_are_the_same_rewards_dealt_to_other_rollouts():
    before = make_triplets(*ROWS)
    after = shuffle_rewards(before, seed=1)
    assert sorted(after["reward"].to_pylist()) == sorted(before["reward"].to_pylist())
    assert after["reward"].to_pylist() != before["reward"].to_pylist()
    assert after.drop(["reward", "rewards"]).equals(before.drop(["reward", "rewards"]))


def test_every_call_of_a_rollout_gets_the_same_dealt_reward():
    rewards = shuffle_rewards(make_triplets(*ROWS), seed=1)["reward"].to_pylist()
    assert rewards[::2] == rewards[1::2]


def test_the_same_seed_deals_the_same():
    first, second = (shuffle_rewards(make_triplets(*ROWS), seed=7) for _ in range(2))
    assert first.equals(second)
