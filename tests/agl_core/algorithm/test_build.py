import pytest

from agl_core.algorithm.build import build_algorithm
from agl_core.config import RunConfig
from agl_core.errors import ConfigError

CONFIG = {
    "run_id": "r",
    "ledger": "l",
    "agent": "a:b",
    "train_data": "t.jsonl",
    "algorithm": {
        "config": {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        }
    },
}


@pytest.mark.parametrize("asked", [None, 2, 3])
def test_a_group_may_have_to_be_larger_than_the_algorithm_needs(asked: int | None):
    algorithm = build_algorithm(RunConfig.model_validate({**CONFIG, "min_group_size": asked}))
    assert algorithm.batch_settings.min_group_size == (asked or 2)


def test_a_group_that_is_too_small_to_compare_is_refused():
    config = RunConfig.model_validate({**CONFIG, "min_group_size": 1})
    with pytest.raises(ConfigError, match="min_group_size is 1; grpo compares at least 2"):
        build_algorithm(config)
