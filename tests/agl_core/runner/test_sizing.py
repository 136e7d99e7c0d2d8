import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.config import RolloutSettings
from agl_core.runner.sizing import Measured, plan_shards

POOL = "rollout-shard/rollout-shard"


def settings(**values: object) -> RolloutSettings:
    return RolloutSettings.model_validate({"deployment": POOL, **values})


@pytest.mark.parametrize(
    ("count", "measured", "sizes"),
    [
        (10, None, [10]),
        (256, None, [64] * 4),
        (40, None, [20, 20]),  # a shard has at least 16
        (4096, None, [512] * 8),
        (1024, Measured(10.0, 20.0), [32] * 32),  # 1024 x 20 s / 32 at once: 32 x 20 s
        (1024, Measured(10.0, 5.0), [128] * 8),
        (1024, Measured(10.0, 0.1), [256] * 4),  # starting more would take longer than they run
    ],
)
def test_shards_run_at_least_twice_as_long_as_they_take_to_start(count, measured, sizes):
    assert list(plan_shards(count, settings(), measured).sizes) == sizes


def test_a_stated_size_is_honoured():
    assert plan_shards(10, settings(shard_size=4), Measured(1.0, 100.0)).sizes == (4, 3, 3)


def test_in_process_one_shard_runs_up_to_512_rollouts():
    assert plan_shards(512, RolloutSettings(), None).sizes == (512,)


def test_what_the_model_server_bears_is_divided_over_the_living_shards():
    plan = plan_shards(256, settings(max_in_flight=16, concurrency=32), None)
    assert (plan.at_once, plan.concurrency) == (4, 4)
    plan = plan_shards(256, settings(max_in_flight=3, shard_size=16), None)
    assert (len(plan.sizes), plan.at_once, plan.concurrency) == (16, 3, 1)


def test_no_more_shards_at_once_than_the_workers_run():
    plan = plan_shards(4096, settings(max_shards=2), Measured(1.0, 100.0))
    assert plan.at_once == 2
    assert max(plan.sizes) <= 512


@given(
    count=st.integers(1, 5000),
    concurrency=st.integers(1, 64),
    max_shards=st.integers(1, 40),
    max_in_flight=st.none() | st.integers(1, 200),
    shard_size=st.none() | st.integers(1, 600),
    measured=st.none()
    | st.builds(Measured, st.floats(0, 100, allow_nan=False), st.floats(0, 600, allow_nan=False)),
)
def test_every_rollout_is_in_one_shard_and_the_limits_hold(
    count, concurrency, max_shards, max_in_flight, shard_size, measured
):
    given_settings = settings(
        concurrency=concurrency,
        max_shards=max_shards,
        max_in_flight=max_in_flight,
        shard_size=shard_size,
    )
    plan = plan_shards(count, given_settings, measured)
    assert sum(plan.sizes) == count
    assert min(plan.sizes) >= 1
    assert max(plan.sizes) <= (shard_size or 512)
    assert 1 <= plan.at_once <= max_shards
    assert 1 <= plan.concurrency <= concurrency
    if max_in_flight is not None:
        assert plan.at_once * plan.concurrency <= max_in_flight
