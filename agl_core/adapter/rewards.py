"""Which model call each emitted reward belongs to: pure.

The last reward in the list of spans is the attempt's final reward (`agl_core.emitter.reward`, the
one rule) and belongs to the last call, so that a trainer that reads the last triplet and
`find_final_reward` agree. Every other reward belongs to the call that it is linked to, else to the
call that it follows. Several may belong to one call; none is moved to another because of that.
Under `first_sibling` the last reward too stays with the call that it follows; one that follows none
(a returned reward) belongs to the last call.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from agl_core import semconv
from agl_core.adapter.attributes import as_dict, as_list, unflatten
from agl_core.emitter.reward import DEFAULT_REWARD_NAME, final_reward, get_reward_value, to_float
from agl_core.types.tracer import Span


class RewardMatchPolicy(StrEnum):
    """Which calls a reward without a link may follow."""

    FIRST_OCCURRENCE = "first_occurrence"
    """Any call."""
    FIRST_SIBLING = "first_sibling"
    """Calls with the same parent as the reward; the last reward too, if there is one."""


@dataclass(frozen=True, slots=True)
class EmittedReward:
    """One reward as it was recorded."""

    span_id: str
    value: float
    """The primary reward."""
    values: dict[str, float]
    """All rewards of the span by name, the primary one included."""
    about: str | None = None
    """Id of the span of the call that the reward is linked to or follows. Of the final reward this
    need not be the last call, though it is on the last triplet.
    """


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a call is in the trace."""

    span: Span
    position: int
    """In the list of spans."""
    parent_id: str | None


@dataclass(frozen=True, slots=True)
class RewardMatch:
    """What became of the rewards of an attempt: each is in one place."""

    attached: list[list[EmittedReward]]
    """For each call, in the order of the spans; the last call's last one is the final reward."""
    unmatched: list[EmittedReward]
    """Emitted before any call that they could belong to, or about one that is lost."""
    final: float | None
    source: str | None
    """Id of the span whose reward is the final one."""


def match_by_time(
    spans: Sequence[Span],
    calls: Sequence[CallPlace],
    lost_calls: Sequence[CallPlace],
    parents: Mapping[str, str],
    policy: RewardMatchPolicy,
) -> RewardMatch:
    """Return rewards with the calls that ended last before them.

    Args:
        spans: Of the attempt, in the order in which the store returns them.
        calls: In chronological order.
        lost_calls: Further calls that a reward may belong to, but that can take none.
        parents: Id of each span's parent in the repaired tree.
        policy: Which calls a reward may follow.

    Raises:
        ValueError: The final reward is NaN or infinite.
    """
    siblings_only = policy is RewardMatchPolicy.FIRST_SIBLING
    groups: dict[str | None, list[tuple[CallPlace, int]]] = {}
    for index, call in enumerate([*calls, *lost_calls]):
        key = call.parent_id if siblings_only else None
        groups.setdefault(key, []).append((call, index))
    ended = {key: _Ended(group) for key, group in groups.items()}

    def follow(span: Span, position: int) -> int | None:
        group = ended.get(parents.get(span.span_id) if siblings_only else None)
        return group.last_before(span, position) if group else None

    return _match(spans, calls, lost_calls, follow, always_last=not siblings_only)


def match_by_sequence(
    spans: Sequence[Span], calls: Sequence[CallPlace], lost_calls: Sequence[CallPlace]
) -> RewardMatch:
    """Return rewards with the calls of the next lower sequence id; no clock is read.

    Args:
        spans: Of the attempt, in the order in which the store returns them.
        calls: By sequence id.
        lost_calls: Further calls that a reward may belong to, but that can take none.

    Raises:
        ValueError: The final reward is NaN or infinite.
    """
    numbered = sorted(
        (call.span.sequence_id, index) for index, call in enumerate([*calls, *lost_calls])
    )

    def follow(span: Span, position: int) -> int | None:
        found = bisect_left(numbered, (span.sequence_id, -1)) - 1
        return numbered[found][1] if found >= 0 else None

    return _match(spans, calls, lost_calls, follow)


class _Ended:
    """Calls by when they ended; by their position where a time is unknown."""

    def __init__(self, calls: Sequence[tuple[CallPlace, int]]) -> None:
        ends = [math.nan if c.span.end_time is None else c.span.end_time for c, _ in calls]
        self._has_times = not any(map(math.isnan, ends))
        self._by_end = sorted((end, i) for end, (_, i) in zip(ends, calls, strict=True))
        self._by_position = sorted((call.position, i) for call, i in calls)

    def last_before(self, span: Span, position: int) -> int | None:
        """Return the index of the call that ended last before a span started."""
        known = self._has_times and span.start_time is not None
        entries = self._by_end if known else self._by_position
        limit = (span.start_time if known else position, math.inf)
        found = bisect_right(entries, limit) - 1
        return entries[found][1] if found >= 0 else None


def _match(
    spans: Sequence[Span],
    calls: Sequence[CallPlace],
    lost_calls: Sequence[CallPlace],
    follow: Callable[[Span, int], int | None],
    *,
    always_last: bool = True,
) -> RewardMatch:
    all_calls = [*calls, *lost_calls]
    links = _LinkIndex(all_calls)
    attached: list[list[EmittedReward]] = [[] for _ in calls]
    unmatched: list[EmittedReward] = []
    # By id: a span that is in the list twice is one reward, at its last place.
    by_id = {s.span_id: (p, s) for p, s in enumerate(spans) if get_reward_value(s) is not None}
    emitted = sorted(by_id.values(), key=lambda placed: placed[0])
    for number, (position, span) in enumerate(emitted, start=1):
        reward = _read_reward(span)
        index = links.find(span)
        if index is None:
            index = follow(span, position)
        if index is not None:
            reward = replace(reward, about=all_calls[index].span.span_id)
        if number == len(emitted) and calls and (always_last or index is None):
            index = len(calls) - 1
        if index is None or index >= len(calls):
            unmatched.append(reward)
        else:
            attached[index].append(reward)
    source = emitted[-1][1].span_id if emitted else None
    return RewardMatch(attached, unmatched, final_reward(None, spans), source)


class _LinkIndex:
    """Finds calls by the links of a reward: names and values that all have to match."""

    def __init__(self, calls: Sequence[CallPlace]) -> None:
        self._calls = calls
        self._by_name: dict[str, dict[str, list[int]]] = {}

    def find(self, span: Span) -> int | None:
        """Return the index of the last call that all links of a span match, or None."""
        recorded = map(as_dict, as_list(unflatten(span.attributes, semconv.LINK_PREFIX)))
        links = [(str(link.get("key_match")), str(link.get("value_match"))) for link in recorded]
        if not links:
            return None
        fewest = min((self._having(name, value) for name, value in links), key=len)
        for index in reversed(fewest):
            linked = self._calls[index].span
            if all(_linkable(linked, name) == value for name, value in links):
                return index
        return None

    def _having(self, name: str, value: str) -> list[int]:
        if name not in self._by_name:
            by_value = self._by_name[name] = {}
            for index, call in enumerate(self._calls):
                by_value.setdefault(_linkable(call.span, name), []).append(index)
        return self._by_name[name].get(value, [])


def _linkable(span: Span, name: str) -> str:
    """Return what a link may name of a span: its ids, or an attribute."""
    if name in ("trace_id", "span_id"):
        return str(getattr(span, name))
    return str(span.attributes.get(name, ""))


def _read_reward(span: Span) -> EmittedReward:
    value = get_reward_value(span)
    assert value is not None
    values: dict[str, float] = {}
    recorded: Any = unflatten(span.attributes, semconv.REWARD_PREFIX)
    for entry in map(as_dict, as_list(recorded)):
        if isinstance(entry.get("value"), int | float):
            values[str(entry.get("name"))] = to_float(entry["value"])
    return EmittedReward(span.span_id, value, values or {DEFAULT_REWARD_NAME: value})
