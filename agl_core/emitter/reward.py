"""Rewards: how an agent emits them, and the one rule for what an attempt's final reward is.

A reward is an annotation span with `agentlightning.reward.<i>.name` and `.value`; index 0 is the
primary one.
"""

import functools
import inspect
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, TypedDict, TypeVar

from agl_core import semconv
from agl_core.emitter.annotation import emit_annotation
from agl_core.semconv import RewardPydanticModel
from agl_core.tracer.attributes import filter_and_unflatten_attributes
from agl_core.types.tracer import SpanCoreFields, SpanLike

logger = logging.getLogger(__name__)

DEFAULT_REWARD_NAME = "primary"
_AGENTOPS_OUTPUTS = (semconv.AGENTOPS_TASK_OUTPUT, semconv.AGENTOPS_ENTITY_OUTPUT)

AnySpan = TypeVar("AnySpan", bound=SpanLike)


class RewardDimension(TypedDict):
    """One named reward of several."""

    name: str
    value: float


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Record a reward in the current attempt and return its span.

    Args:
        reward: One number (`docs/design/runner.md` says what counts as one), or several by name.
        primary_key: Which of several rewards is the one to train on; required with a dict, refused
            with a number.
        attributes: Further attributes of the span.
        propagate: Whether the active tracer records it; else it is only returned.

    Raises:
        RuntimeError: The code runs outside of any attempt.
        TypeError: The reward is neither a number nor a dict.
        ValueError: A reward is not a finite number, or `primary_key` does not fit.
    """
    named = _named_rewards(reward, primary_key)
    recorded: dict[str, Any] = dict(attributes or {})
    for number, (name, value) in enumerate(named):
        recorded[f"{semconv.REWARD_PREFIX}.{number}.name"] = name
        recorded[f"{semconv.REWARD_PREFIX}.{number}.value"] = value
    return emit_annotation(recorded, propagate)


def _named_rewards(
    reward: float | Mapping[str, float], primary_key: str | None
) -> list[tuple[str, float]]:
    """Return names and values, the primary reward first."""
    if isinstance(reward, Mapping):
        reward = {name: unboxed(value) for name, value in reward.items()}
        if primary_key is None or primary_key not in reward:
            names = sorted(map(str, reward))
            said = (
                f"Primary key '{primary_key}' not found in reward dict keys"
                if primary_key is not None
                else "When emitting a multi-dimensional reward as a dict, primary_key must be "
                "provided"
            )
            raise ValueError(f"{said}: primary_key must name one of {names}, got {primary_key!r}")
        for name, value in reward.items():
            if not isinstance(name, str):
                raise ValueError(f"the name of reward {name!r} is not a string")
            if not isinstance(value, Real):
                raise ValueError(
                    f"Reward value must be a number, got: {value!r} for key "
                    f"{name}: reward {name!r} is {value!r}, not a number"
                )
        names = [primary_key, *(name for name in reward if name != primary_key)]
        return [(name, check_reward(reward[name])) for name in names]
    number: Any = unboxed(reward)
    if not isinstance(number, Real):
        raise TypeError(
            f"Reward must be a number, got: {type(reward).__name__}; a reward is a number or a "
            f"dict of numbers, got {describe_no_number(reward)}"
        )
    if primary_key is not None:
        raise ValueError(f"primary_key {primary_key!r} needs a dict of rewards, got a number")
    return [(DEFAULT_REWARD_NAME, check_reward(number))]


def unboxed(value: Any) -> Any:
    """Return the number in an array or tensor without dimensions, and a `Decimal` as a float;
    anything else as it is. A masked number of numpy, whose `item` would give 0, is NaN.
    """
    if isinstance(value, Decimal):
        return float(value)
    if getattr(value, "shape", None) == () and getattr(value, "mask", False):
        return math.nan
    is_box = getattr(value, "shape", None) == () and callable(getattr(value, "item", None))
    return value.item() if is_box else value


def describe_no_number(value: Any) -> str:
    """Return what was given instead of a number, and what to do."""
    text = f"{type(value).__name__}: {value!r:.80}"
    if isinstance(value, str):
        return f"{text}; convert text with float(...)"
    if isinstance(value, Mapping):
        return f"{text}; several rewards are emitted with emit_reward(..., primary_key=...)"
    if getattr(value, "shape", None):
        return f"{text}; choose one value of an array with dimensions: x.item(), x.mean()"
    if isinstance(value, list | tuple) and value and isinstance(unboxed(value[0]), Real):
        return f"{text}; give the number alone, and record the rest with emit_annotation"
    return text


def check_reward(reward: float | Real) -> float:
    """Return the reward as a float.

    Raises:
        ValueError: It is NaN, infinite, or too large for a float.
    """
    value = to_float(reward)
    if not math.isfinite(value):
        raise ValueError(f"a reward must be finite, got {value!r}")
    return value


def to_float(number: float | Real) -> float:
    """Return a number as a float; one that is too large is infinite."""
    try:
        return float(number)
    except OverflowError:
        return -math.inf if number < 0 else math.inf


def get_reward_value(span: SpanLike) -> float | None:
    """Return the primary reward that a span records, or None.

    Understood, in this order: our attributes, AgentOps task and entity outputs
    (`{"type": "reward", "value": ...}`), the attribute `reward` of an annotation (Agent Lightning
    0.2), and the score of an OpenTelemetry evaluation.
    """
    attributes = span.attributes or {}
    candidates = [attributes.get(semconv.PRIMARY_REWARD_VALUE)]
    candidates += [_agentops_reward(attributes.get(name)) for name in _AGENTOPS_OUTPUTS]
    if span.name == semconv.ANNOTATION_SPAN:
        candidates.append(attributes.get("reward"))
    candidates.append(attributes.get(semconv.EVALUATION_SCORE))
    for candidate in candidates:
        if isinstance(candidate, int | float):
            return to_float(candidate)
    return None


def _agentops_reward(output: Any) -> Any:
    if isinstance(output, str):
        try:
            output = json.loads(output)
        except (ValueError, RecursionError):
            return None
    if isinstance(output, Mapping) and output.get("type") == "reward":
        return output.get("value")
    return None


def get_rewards_from_span(span: SpanLike) -> list[RewardPydanticModel]:
    """Return all dimensions of the reward that a span records, the primary one first.

    Raises:
        ValueError: They are not a list of names and numbers.
    """
    rewards = filter_and_unflatten_attributes(span.attributes or {}, semconv.REWARD_PREFIX)
    if not rewards:
        value = get_reward_value(span)
        named = {"name": DEFAULT_REWARD_NAME, "value": value}
        return [] if value is None else [RewardPydanticModel.model_validate(named)]
    if not isinstance(rewards, list):
        raise ValueError(f"rewards are not {semconv.REWARD_PREFIX}.0 .. n-1: {rewards!r:.80}")
    return [RewardPydanticModel.model_validate(reward) for reward in rewards]


def is_reward_span(span: SpanLike) -> bool:
    """Say whether a span records a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[AnySpan]) -> list[AnySpan]:
    """Return the spans that record a reward."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Iterable[SpanLike]) -> float | None:
    """Return the last reward that the spans record, in their given order, or None."""
    rewards = [value for span in spans if (value := get_reward_value(span)) is not None]
    return rewards[-1] if rewards else None


def final_reward(returned: float | None, spans: Iterable[SpanLike]) -> float | None:
    """Return an attempt's reward: what the agent returned, else what it emitted last, else None.

    Where the two differ, both stay recorded and a warning says so, once per process.

    Raises:
        ValueError: The reward is NaN or infinite.
    """
    emitted = find_final_reward(spans)
    if returned is None:
        return None if emitted is None else check_reward(emitted)
    if emitted is not None and emitted != to_float(returned):
        _warn_rewards_differ()
    return check_reward(returned)


@functools.cache
def _warn_rewards_differ() -> None:
    logger.warning(
        "an agent returned a reward that differs from the last one it emitted; the returned one "
        "counts, both are kept (said once)"
    )


def reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Emit what a function returns as a reward; None is not emitted.

    Deprecated: call `emit_reward`.
    """
    warnings.warn(
        "the decorator `reward` is deprecated; call emit_reward",
        DeprecationWarning,
        stacklevel=2,
    )

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return _emitted(await function(*args, **kwargs))

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _emitted(function(*args, **kwargs))

    return call


def _emitted(result: Any) -> Any:
    if result is not None:
        emit_reward(result)
    return result
