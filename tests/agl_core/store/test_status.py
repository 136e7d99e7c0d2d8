import itertools

import pytest

from agl_core import store
from agl_core.store import base
from agl_core.store.status import (
    ATTEMPT_STATUSES,
    ATTEMPT_TRANSITIONS,
    FINISHED,
    LIVE_ATTEMPT,
    QUEUING,
    ROLLOUT_STATUSES,
    ROLLOUT_TRANSITIONS,
    RUNNING,
    attempt_may_follow,
    is_finished,
    is_queuing,
    is_running,
    may_follow,
    may_recover,
    may_retry,
    rollout_status,
)
from agl_core.types.core import AttemptStatus, Rollout, RolloutConfig


def test_names_are_found_where_agent_lightning_has_them():
    assert (base.is_queuing, base.is_running, base.is_finished) == (
        is_queuing,
        is_running,
        is_finished,
    )
    assert store.LightningStoreStatistics is base.LightningStoreStatistics


def test_a_rollout_may_be_given_for_its_status():
    rollout = Rollout(rollout_id="ro-1", input=1, start_time=0.0, status="requeuing")
    assert [is_queuing(rollout), is_running(rollout), is_finished(rollout)] == [True, False, False]


def test_every_status_has_its_row_and_rows_name_known_statuses():
    assert set(ROLLOUT_TRANSITIONS) == set(ROLLOUT_STATUSES)
    assert set(ATTEMPT_TRANSITIONS) == set(ATTEMPT_STATUSES)
    assert set().union(*ROLLOUT_TRANSITIONS.values()) <= set(ROLLOUT_STATUSES)
    assert set().union(*ATTEMPT_TRANSITIONS.values()) <= set(ATTEMPT_STATUSES)


def test_every_rollout_status_is_exactly_one_of_queuing_running_finished():
    for status in ROLLOUT_STATUSES:
        assert [is_queuing(status), is_running(status), is_finished(status)].count(True) == 1
    assert set(ROLLOUT_STATUSES) == QUEUING | RUNNING | FINISHED


def test_every_attempt_status_is_either_running_or_finished():
    for status in ATTEMPT_STATUSES:
        assert is_running(status) != is_finished(status)


def test_ends_of_rollouts_are_final_and_reached_from_everywhere_else():
    for before, after in itertools.product(ROLLOUT_STATUSES, ROLLOUT_STATUSES):
        if before in FINISHED:
            assert may_follow(before, after) == (before == after)
        elif after in FINISHED:
            assert may_follow(before, after)


def test_no_rollout_goes_back_to_queuing():
    for before in ROLLOUT_STATUSES:
        assert may_follow(before, "queuing") == (before == "queuing")


def test_ends_of_attempts_are_final_except_silence_that_may_recover():
    for before, after in itertools.product(ATTEMPT_STATUSES, ATTEMPT_STATUSES):
        if before in LIVE_ATTEMPT or before == after:
            continue
        assert not attempt_may_follow(before, after)
        recovers = before == "unresponsive" and after not in ("preparing", "timeout")
        assert attempt_may_follow(before, after, recoverable=True) == recovers


def test_live_attempts_reach_every_end_and_never_go_back():
    for before in LIVE_ATTEMPT:
        for after in ATTEMPT_STATUSES:
            expected = before == after or after != "preparing"
            assert attempt_may_follow(before, after) == expected


def test_only_the_latest_silent_attempt_of_a_requeued_rollout_may_recover():
    for attempt, rollout, latest in itertools.product(
        ATTEMPT_STATUSES, ROLLOUT_STATUSES, (True, False)
    ):
        expected = attempt == "unresponsive" and rollout == "requeuing" and latest
        assert may_recover(attempt, rollout, is_latest=latest) == expected


@pytest.mark.parametrize("status", ATTEMPT_STATUSES)
@pytest.mark.parametrize("sequence_id", [1, 2, 3])
def test_an_attempt_is_followed_by_another_while_the_config_allows(
    status: AttemptStatus, sequence_id: int
):
    config = RolloutConfig(max_attempts=2, retry_condition=["timeout", "failed"])
    expected = status in ("timeout", "failed") and sequence_id == 1
    assert may_retry(status, sequence_id, config) == expected


@pytest.mark.parametrize("before", ["preparing", "running", "requeuing"])
def test_every_status_that_follows_from_an_attempt_can_be_reached(before: str):
    for status, sequence_id in itertools.product(ATTEMPT_STATUSES, (1, 2)):
        for retried in ([], [status]):
            config = RolloutConfig(max_attempts=2, retry_condition=retried)
            after = rollout_status(status, sequence_id, config)
            assert may_follow(before, after)  # pyright: ignore[reportArgumentType]


def test_ends_without_another_attempt_end_the_rollout():
    config = RolloutConfig()
    ends = {status: rollout_status(status, 1, config) for status in ATTEMPT_STATUSES}
    assert ends == {
        "preparing": "preparing",
        "running": "running",
        "succeeded": "succeeded",
        "failed": "failed",
        "timeout": "failed",
        "unresponsive": "failed",
        "cancelled": "cancelled",
    }
