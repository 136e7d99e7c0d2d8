from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agl_core.config import RunConfig, check_settings
from agl_core.errors import ConfigError
from agl_core.failures import FailurePolicy, FailureSettings, FailureTally
from agl_core.types.outcome import FailureKind

RUN = {
    "run_id": "x",
    "ledger": "l",
    "agent": "a:b",
    "train_data": "t",
    "algorithm": {"config": {}},
}


def settings(**values: Any) -> FailureSettings:
    return FailureSettings.model_validate(values)


def tally(expected: int, *kinds: str, groups: int = 1, **values: object) -> FailureTally:
    found = FailureTally(settings(**values), "train", expected)
    for index, kind in enumerate(kinds):
        found.add(f"ro-{index}", index % groups, FailureKind(kind), "ValueError: no")
    return found


def test_infrastructure_and_deadlines_are_tried_again_and_an_agents_own_errors_are_not():
    attempts = {kind.value: p.attempts for kind, p in settings().policies().items()}
    assert attempts == {
        "agent_error": 1,
        "timeout": 2,
        "infra_error": 2,
        "no_trace": 1,
        "no_reward": 1,
    }
    changed = settings(timeout={"delay_seconds": 3})
    assert changed.timeout.attempts == 2, "one setting of a kind leaves the others as they are"


def test_waits_grow_up_to_their_limit_and_end_with_the_attempts():
    policy = FailurePolicy(
        attempts=5, delay_seconds=2, backoff=3, max_delay_seconds=10, jitter=0.25
    )
    waits = [policy.delay_after(attempt, "", draw=0.0) for attempt in range(1, 6)]
    assert waits == [2, 6, 10, 10, None]
    assert policy.delay_after(1, "", draw=1.0) == 2.5
    assert policy.delay_after(1, "", draw=-1.0) == 1.5
    assert settings(timeout=policy.model_dump()).longest_wait_seconds() == 1.25 * 28


def test_a_permanent_failure_is_not_tried_again():
    policy = FailurePolicy(attempts=3, permanent=("^NotFoundError", r"model '\w+' is unknown"))
    assert policy.delay_after(1, "NotFoundError: 404", draw=0.0) is None
    assert policy.delay_after(1, "APIError: model 'x' is unknown", draw=0.0) is None
    assert policy.delay_after(1, "APIError: NotFoundError", draw=0.0) == 1.0


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"timeout": {"permanent": ["("]}}, r"failures.timeout.permanent: .*no regular expression"),
        ({"timeout": {"then": "zero"}}, r"failures.timeout.then: .*'mask', 'drop_group' or 'fail'"),
        ({"timeout": {"attempt": 2}}, r"'failures.timeout.attempt'; did you mean 'attempts'"),
        ({"succeeded": {}}, "unknown setting 'failures.succeeded'"),
        ({"min_success_fraction": 2}, "failures.min_success_fraction: "),
    ],
)
def test_a_wrong_policy_is_one_sentence(failures: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        check_settings(RunConfig, RUN | {"failures": failures})


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("max_attempts", 3, "failures.<kind>.attempts"),
        ("retry", ["timeout"], "failures.<kind>.attempts"),
        ("retry_delay_seconds", 1.0, "failures.<kind>.delay_seconds"),
    ],
)
def test_a_setting_of_the_old_name_names_the_new_place(name: str, value: Any, place: str):
    sentence = f"{name} is set for each kind of failure now: {place}"
    with pytest.raises(ConfigError, match=sentence):
        check_settings(RunConfig, RUN | {"rollout": {name: value}})


def test_only_the_users_word_makes_a_missing_reward_zero():
    assert settings().no_reward.then == "mask"
    assert settings(no_reward={"then": "zero"}).identity()["no_reward"] == "zero"
    for kind in ("agent_error", "timeout", "infra_error", "no_trace"):
        with pytest.raises(ValidationError):
            settings(**{kind: {"then": "zero"}})


def test_how_often_is_tried_and_how_many_may_fail_is_no_part_of_a_runs_identity():
    changed = settings(
        timeout={"attempts": 9, "then": "fail"}, min_success_fraction=0.1, give_up_after=3
    )
    assert changed.identity() == settings().identity()
    assert settings(timeout={"then": "drop_group"}).identity() != settings().identity()


def test_a_set_stops_as_soon_as_too_few_can_succeed():
    assert tally(8, *["timeout"] * 4).stop_reason() is None
    reason = tally(8, *["timeout"] * 4, "agent_error").stop_reason()
    assert reason == (
        "the rollouts of train stop: fewer than failures.min_success_fraction = 0.5 can succeed; "
        "5 of 8 failed (4 timeout, 1 agent_error), most often (4 times) as timeout: ValueError: no"
    )


def test_a_kind_may_have_a_limit_of_its_own():
    limit = {"max_fraction": 0.25}
    assert tally(8, "infra_error", "infra_error", infra_error=limit).stop_reason() is None
    reason = tally(8, *["infra_error"] * 3, infra_error=limit).stop_reason()
    assert reason is not None
    assert "more than failures.infra_error.max_fraction = 0.25 failed" in reason


def test_a_failure_that_stops_the_iteration_names_its_rollout():
    reason = tally(100, "succeeded", "timeout", timeout={"then": "fail"}).stop_reason()
    assert reason == (
        "the rollouts of train stop: rollout ro-1 ended as timeout: ValueError: no "
        "(failures.timeout.then)"
    )


def test_a_broken_agent_is_given_up_and_a_bad_row_is_not():
    assert tally(512, *["agent_error"] * 15, groups=4).stop_reason() is None
    reason = tally(512, *["agent_error"] * 16, groups=4).stop_reason()
    assert reason is not None
    assert "none of the first failures.give_up_after = 16 succeeded" in reason
    assert tally(512, *["agent_error"] * 32, groups=3).stop_reason() is None
    assert tally(512, "succeeded", *["agent_error"] * 31, groups=4).stop_reason() is None


@given(
    expected=st.integers(1, 40),
    failed=st.integers(0, 40),
    share=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]),
)
def test_the_limit_is_exact(expected: int, failed: int, share: float):
    failed = min(failed, expected)
    kinds = ["succeeded"] * (expected - failed) + ["timeout"] * failed
    reason = tally(expected, *kinds, min_success_fraction=share).stop_reason()
    tenths = round(share * 10)
    assert (reason is not None) == (10 * (expected - failed) < tenths * expected)


def test_a_rollout_that_is_trained_on_zero_is_no_failure():
    ends = ["no_reward"] * 16
    assert tally(16, *ends, groups=4).stop_reason() is not None
    assert tally(16, *ends, groups=4, no_reward={"then": "zero"}).stop_reason() is None


def test_the_sentence_of_a_stop_is_bounded():
    found = FailureTally(settings(), "train", 1)
    found.add("ro-1", 0, FailureKind.AGENT_ERROR, "x" * 10_000)
    assert len(found.stop_reason() or "") < 600


def test_a_pattern_makes_an_agents_error_one_of_the_infrastructure():
    settings = FailureSettings.model_validate({"infra_error": {"patterns": ["^ToolDown"]}})
    agent, infra = FailureKind.AGENT_ERROR, FailureKind.INFRA_ERROR
    assert settings.kind_of(agent, "ToolDown: maintenance") is infra
    assert settings.kind_of(agent, "ValueError: ToolDown") is agent
    assert settings.kind_of(FailureKind.TIMEOUT, "ToolDown") is FailureKind.TIMEOUT
    with pytest.raises(ValueError, match="is no regular expression"):
        FailureSettings.model_validate({"infra_error": {"patterns": ["("]}})
