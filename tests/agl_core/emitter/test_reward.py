import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from agl_core import semconv
from agl_core.emitter import (
    emit_reward,
    final_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)
from agl_core.emitter.reward import _warn_rewards_differ
from agl_core.semconv import RewardPydanticModel
from agl_core.tracer import OtelTracer


def make_span(reward=None, name=semconv.ANNOTATION_SPAN, **attributes):
    if reward is not None:
        attributes[semconv.PRIMARY_REWARD_VALUE] = reward
    return SimpleNamespace(name=name, attributes=attributes)


@pytest.mark.parametrize(("reward", "value"), [(0.5, 0.5), (1, 1.0), (True, 1.0)])
def test_scalar_reward_is_the_primary_one(reward, value):
    with OtelTracer().attempt("ro-1", "at-1") as trace:
        emit_reward(reward, attributes={"why": "test"})
    attributes = trace.spans()[0].attributes
    assert attributes[semconv.PRIMARY_REWARD_NAME] == "primary"
    assert attributes[semconv.PRIMARY_REWARD_VALUE] == value
    assert isinstance(attributes[semconv.PRIMARY_REWARD_VALUE], float)
    assert attributes["why"] == "test"


def test_primary_key_comes_first():
    with OtelTracer().attempt("ro-1", "at-1") as trace:
        emit_reward({"style": 0.1, "exact": 1.0}, primary_key="exact")
    attributes = trace.spans()[0].attributes
    assert attributes["agentlightning.reward.0.name"] == "exact"
    assert attributes["agentlightning.reward.1.name"] == "style"
    assert attributes["agentlightning.reward.1.value"] == 0.1


@pytest.mark.parametrize(
    ("reward", "primary_key", "error"),
    [
        ({"a": 1.0}, None, ValueError),
        ({"a": 1.0}, "b", ValueError),
        ({"a": "1"}, "a", ValueError),
        ("1", None, TypeError),
        (None, None, TypeError),
        (float("nan"), None, ValueError),
        ({"a": float("inf")}, "a", ValueError),
        (1.0, "a", ValueError),
    ],
)
def test_reward_that_is_none_is_refused(reward, primary_key, error):
    with OtelTracer().attempt("ro-1", "at-1") as trace, pytest.raises(error):
        emit_reward(reward, primary_key=primary_key)
    assert len(trace.spans()) == 1


def test_reward_outside_of_an_attempt_is_refused():
    with pytest.raises(RuntimeError, match="no active tracer"):
        emit_reward(1.0)


@pytest.mark.parametrize(
    ("span", "value"),
    [
        (make_span(0.25), 0.25),
        (
            make_span(name="other", **{"agentops.task.output": '{"type": "reward", "value": 2}'}),
            2.0,
        ),
        (make_span(name="x", **{"agentops.entity.output": {"type": "reward", "value": 0.5}}), 0.5),
        (make_span(name="x", **{"agentops.task.output": "no json"}), None),
        (make_span(name="x", **{"gen_ai.evaluation.score.value": 0.25}), 0.25),
        (SimpleNamespace(name=semconv.ANNOTATION_SPAN, attributes={"reward": 3}), 3.0),
        (SimpleNamespace(name="x", attributes={"reward": 3}), None),
        (SimpleNamespace(name="x", attributes=None), None),
    ],
)
def test_reward_of_a_span(span, value):
    assert get_reward_value(span) == value


def test_last_emitted_reward_counts():
    assert find_final_reward([make_span(0.1), make_span(1.0), make_span(name="x")]) == 1.0
    assert find_final_reward([]) is None


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return our own messages: threads of other libraries may log at any time."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("agl_core.emitter")]


@pytest.fixture
def _warn_again():
    _warn_rewards_differ.cache_clear()


@pytest.mark.usefixtures("_warn_again")
def test_returned_reward_wins_and_the_difference_is_said_once(caplog):
    spans = [make_span(0.25)]
    assert final_reward(0.75, spans) == 0.75
    assert final_reward(0.5, spans) == 0.5
    assert len(said(caplog)) == 1


@pytest.mark.usefixtures("_warn_again")
def test_equal_or_single_rewards_raise_no_warning(caplog):
    assert final_reward(0.25, [make_span(0.25)]) == 0.25
    assert final_reward(None, [make_span(0.25)]) == 0.25
    assert final_reward(0.0, []) == 0.0
    assert final_reward(None, []) is None
    assert not said(caplog)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        final_reward(bad, [])
    with pytest.raises(ValueError, match="finite"):
        final_reward(None, [make_span(bad)])


def test_all_dimensions_of_a_reward_come_back():
    span = emit_reward({"style": 0.1, "exact": 1}, primary_key="exact", propagate=False)
    assert get_rewards_from_span(span) == [
        RewardPydanticModel(name="exact", value=1.0),
        RewardPydanticModel(name="style", value=0.1),
    ]
    legacy = SimpleNamespace(name=semconv.ANNOTATION_SPAN, attributes={"reward": 3})
    assert get_rewards_from_span(legacy) == [RewardPydanticModel(name="primary", value=3.0)]
    assert get_rewards_from_span(SimpleNamespace(name="x", attributes=None)) == []


@pytest.mark.parametrize("broken", [{"1.value": 1.0}, {"0.value": 1.0}, {"0": 1.0}])
def test_broken_rewards_are_refused(broken):
    attributes = {f"{semconv.REWARD_PREFIX}.{name}": value for name, value in broken.items()}
    with pytest.raises(ValueError):  # noqa: PT011 - ours or pydantic's
        get_rewards_from_span(SimpleNamespace(name="x", attributes=attributes))


def test_reward_spans_are_found():
    spans = [make_span(name="x"), make_span(0.0), make_span(1.0)]
    assert find_reward_spans(spans) == spans[1:]
    assert [is_reward_span(span) for span in spans] == [False, True, True]


async def test_the_deprecated_decorator_emits_what_is_returned():
    with pytest.deprecated_call():

        @reward
        def judge(value):
            return value

    with pytest.deprecated_call():

        @reward
        async def judge_async(value):
            return value

    with OtelTracer().attempt("ro-1", "at-1") as trace:
        assert judge(0.5) == 0.5
        assert judge(None) is None
        assert await judge_async(1) == 1
    assert [get_reward_value(span) for span in trace.spans()[:-1]] == [0.5, 1.0]


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_any_real_number_is_a_reward(number):
    for span in (
        emit_reward(number, propagate=False),
        emit_reward({"a": number}, primary_key="a", propagate=False),
    ):
        value = span.attributes[semconv.PRIMARY_REWARD_VALUE]
        assert (value, type(value)) == (0.5, float)


@pytest.mark.parametrize(
    ("reward", "primary_key", "reason"),
    [
        (10**400, None, "must be finite"),
        ({1: 1.0, "a": 2.0}, None, "must name one of"),
        ({1: 1.0, "a": 2.0}, "a", "reward 1 is not a string"),
    ],
)
def test_a_reward_that_cannot_be_recorded_is_a_value_error(reward, primary_key, reason):
    with pytest.raises(ValueError, match=reason):
        emit_reward(reward, primary_key=primary_key, propagate=False)


@pytest.mark.parametrize("output", ["[" * 100_000, '{"type":"reward"', "5"])
def test_an_output_that_is_no_reward_is_none(output):
    assert (
        get_reward_value(make_span(name="task", **{semconv.AGENTOPS_TASK_OUTPUT: output})) is None
    )


def test_a_recorded_reward_beyond_floats_is_infinite():
    assert get_reward_value(make_span(10**400)) == math.inf
    assert get_reward_value(make_span(-(10**400))) == -math.inf
