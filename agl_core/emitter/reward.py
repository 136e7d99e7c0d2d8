"""Rewards: how an agent emits them, and the one rule for what an attempt's final reward is.

A reward is an annotation span with `agentlightning.reward.<i>.name` and `.value`; index 0 is the
primary one.
"""

import functools
import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from opentelemetry.sdk.trace import ReadableSpan

from agl_core import semconv
from agl_core.emitter.annotation import emit_annotation

logger = logging.getLogger(__name__)

DEFAULT_REWARD_NAME = "primary"
_AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")


class SpanLike(Protocol):
    """Any recorded span."""

    @property
    def name(self) -> str:
        """Name of the operation."""
        ...

    @property
    def attributes(self) -> Mapping[str, Any] | None:
        """What was recorded about it."""
        ...


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> ReadableSpan:
    """Record a reward in the current attempt and return its span.

    Args:
        reward: One number (bool and int count as float), or several by name.
        primary_key: Which of several rewards is the one to train on; required with a dict, refused
            with a number.
        attributes: Further attributes of the span.

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
    return emit_annotation(recorded)


def _named_rewards(
    reward: float | Mapping[str, float], primary_key: str | None
) -> list[tuple[str, float]]:
    """Return names and values, the primary reward first."""
    if isinstance(reward, Mapping):
        if primary_key is None or primary_key not in reward:
            raise ValueError(f"primary_key must name one of {sorted(reward)}, got {primary_key!r}")
        for name, value in reward.items():
            if not isinstance(value, int | float):
                raise ValueError(f"reward {name!r} is {value!r}, not a number")
        names = [primary_key, *(name for name in reward if name != primary_key)]
        return [(name, check_reward(reward[name])) for name in names]
    if not isinstance(reward, int | float):
        raise TypeError(f"a reward is a number or a dict of numbers, got {type(reward).__name__}")
    if primary_key is not None:
        raise ValueError(f"primary_key {primary_key!r} needs a dict of rewards, got a number")
    return [(DEFAULT_REWARD_NAME, check_reward(reward))]


def check_reward(reward: float) -> float:
    """Return the reward as a float.

    Raises:
        ValueError: It is NaN or infinite.
    """
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, got {reward!r}")
    return float(reward)


def get_reward_value(span: SpanLike) -> float | None:
    """Return the primary reward that a span records, or None.

    Understood, in this order: our attributes, AgentOps task and entity outputs
    (`{"type": "reward", "value": ...}`), and the attribute `reward` of an annotation (Agent
    Lightning 0.2).
    """
    attributes = span.attributes or {}
    candidates = [attributes.get(semconv.PRIMARY_REWARD_VALUE)]
    candidates += [_agentops_reward(attributes.get(name)) for name in _AGENTOPS_OUTPUTS]
    if span.name == semconv.ANNOTATION_SPAN:
        candidates.append(attributes.get("reward"))
    for candidate in candidates:
        if isinstance(candidate, int | float):
            return float(candidate)
    return None


def _agentops_reward(output: Any) -> Any:
    if isinstance(output, str):
        try:
            output = json.loads(output)
        except ValueError:
            return None
    if isinstance(output, Mapping) and output.get("type") == "reward":
        return output.get("value")
    return None


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
    if emitted is not None and emitted != float(returned):
        _warn_rewards_differ()
    return check_reward(returned)


@functools.cache
def _warn_rewards_differ() -> None:
    logger.warning(
        "an agent returned a reward that differs from the last one it emitted; the returned one "
        "counts, both are kept (said once)"
    )
