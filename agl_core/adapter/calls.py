"""The model calls of one attempt, each once: pure.

One call is often recorded several times: by the agent's client, which knows the agent but may not
keep token ids, and by the proxy, which has the ids but stands beside the agent's spans. Spans with
the same response id are one call, as is a span without one inside the span of a call, if it is the
only such one there. Such a call has its agent from one and its token ids from the other. Spans that
our proxy or tracer numbered differently are different calls, even where a server gives the same id
twice.
"""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from agl_core.adapter.llm_call import (
    Dialect,
    LLMCall,
    find_dialect,
    read_attributes,
    read_response_id,
)
from agl_core.adapter.rewards import CallPlace
from agl_core.adapter.span_tree import TraceTree
from agl_core.emitter.reward import get_reward_value
from agl_core.types.tracer import Span


class CallDropReason(StrEnum):
    """Why a recorded model call gives no triplet."""

    NO_TOKEN_IDS = "no_token_ids"
    """The server returned none, or the client library lost them."""
    FAILED = "failed"
    """Its span has status ERROR."""
    OTHER_AGENT = "other_agent"
    """No agent around it matches `agent_match`."""
    INSIDE_REWARD = "inside_reward"
    """It was made to compute a reward (a judge)."""
    OTHER_NAME = "other_name"
    """It reads as a model call, but the span's name does not match `llm_call_match`."""


@dataclass(frozen=True, slots=True)
class FoundCall(CallPlace):
    """One model call with all that its spans say."""

    agent: str | None
    call: LLMCall
    num_spans: int


@dataclass(frozen=True, slots=True)
class DroppedCall:
    """A model call that gives no triplet."""

    found: FoundCall
    reason: CallDropReason


@dataclass(frozen=True, slots=True)
class CallSearch:
    """The calls of an attempt: `kept` and `dropped` are all that were recorded."""

    kept: list[FoundCall]
    """Answered calls with token ids, in chronological order."""
    dropped: list[DroppedCall]

    @property
    def without_ids(self) -> list[FoundCall]:
        """Calls that were dropped for want of token ids alone."""
        reason = CallDropReason.NO_TOKEN_IDS
        return [drop.found for drop in self.dropped if drop.reason is reason]

    def num_spans(self) -> int:
        """Return how many spans recorded these calls."""
        found = [*self.kept, *(drop.found for drop in self.dropped)]
        return sum(call.num_spans for call in found)


@dataclass(frozen=True, slots=True)
class Sighting(CallPlace):
    """One span of a call."""

    call: LLMCall
    has_name: bool = True
    """Whether the span's name says that it is a call to train on."""
    agent: str | None = None
    in_reward: bool = False


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What is above a node of the tree."""

    parent_id: str | None = None
    agent: str | None = None
    in_reward: bool = False
    call_key: str | None = None


def sight_calls(
    tree: TraceTree, positions: dict[str, int], llm_call_match: str
) -> dict[str, list[Sighting]]:
    """Return the spans of each model call in the tree, in preorder.

    Args:
        tree: The attempt's spans.
        positions: Of each span in the list of spans, by id.
        llm_call_match: Regular expression, found anywhere in a span's name.
    """
    is_call = re.compile(llm_call_match)
    sightings: dict[str, list[Sighting]] = {}
    lonely = _only_anonymous_calls(tree, is_call)
    waiting = [(tree, _Surroundings())]
    while waiting:
        node, above = waiting.pop()
        span, key = node.span, above.call_key
        has_name = is_call.search(span.name) is not None
        dialect = find_dialect(span) or (Dialect.UNKNOWN if has_name else None)
        if dialect is not None:
            call = read_attributes(span.attributes, dialect)
            outer = above.call_key if span.span_id in lonely else None
            own_key = call_key(span, call.response_id, outer)
            key = own_key if has_name else key
            sightings.setdefault(own_key, []).append(
                Sighting(
                    span=span,
                    position=positions.get(span.span_id, -1),
                    parent_id=above.parent_id,
                    call=call,
                    has_name=has_name,
                    agent=above.agent,
                    in_reward=above.in_reward,
                )
            )
        below = _Surroundings(
            parent_id=span.span_id,
            agent=node.agent_name() or above.agent,
            in_reward=above.in_reward or get_reward_value(span) is not None,
            call_key=key,
        )
        waiting.extend((child, below) for child in reversed(node.children))
    return sightings


def _only_anonymous_calls(tree: TraceTree, is_call: re.Pattern[str]) -> set[str]:
    """Return the spans of calls without response id that may be the call that they are in."""
    inside: list[tuple[Span, str]] = []
    waiting: list[tuple[TraceTree, str | None]] = [(tree, None)]
    while waiting:
        node, outer = waiting.pop()
        has_name = is_call.search(node.span.name) is not None
        if has_name or find_dialect(node.span) is not None:
            if outer is not None and not read_response_id(node.span.attributes):
                inside.append((node.span, outer))
            outer = node.span.span_id if has_name else outer
        waiting.extend((child, outer) for child in node.children)
    return only_ones(inside)


def only_ones(inside: Sequence[tuple[Span, str]]) -> set[str]:
    """Return the spans that are alone in their call; one that failed leaves the others alone.

    Args:
        inside: Spans without response id, with the id of the span of the call that each is in.
    """
    answered = Counter(outer for span, outer in inside if _is_answered(span))
    return {span.span_id for span, outer in inside if answered[outer] < 2}


def call_key(span: Span, response_id: str | None, outer: str | None) -> str:
    """Return what spans of the same call have in common."""
    if response_id:
        return f"response {response_id}"
    return outer or f"span {span.span_id}"


def sort_out(
    sightings: Iterable[Sequence[Sighting]], *, agent_match: str | None, skip_in_reward: bool
) -> CallSearch:
    """Return one call for each group of spans, kept or dropped.

    Args:
        sightings: For each call its spans.
        agent_match: Regular expression on the name of the agent; None for calls of any.
        skip_in_reward: Whether to drop calls that were made to compute a reward.
    """
    is_agent = None if agent_match is None else re.compile(agent_match)
    kept: list[FoundCall] = []
    dropped: list[DroppedCall] = []
    for group in chain.from_iterable(map(_split_by_number, sightings)):
        named = [sighting for sighting in group if sighting.has_name]
        agents = [s.agent for s in group if s.agent is not None]
        if is_agent is not None:
            agents = [agent for agent in agents if is_agent.search(agent)]
        main = _main_sighting(named or group, agents)
        found = FoundCall(
            span=main.span,
            position=main.position,
            parent_id=main.parent_id,
            agent=agents[0] if agents else None,
            call=_merged(main.call, [s.call for s in group if _answered(s)]),
            num_spans=len(group),
        )
        reason = _drop_reason(group, found)
        if not named:
            reason = CallDropReason.OTHER_NAME
        elif skip_in_reward and any(sighting.in_reward for sighting in group):
            reason = CallDropReason.INSIDE_REWARD
        elif is_agent is not None and not agents:
            reason = CallDropReason.OTHER_AGENT
        if reason is None:
            kept.append(found)
        else:
            dropped.append(DroppedCall(found, reason))
    return CallSearch(in_order(kept), dropped)


def in_order(calls: Sequence[FoundCall]) -> list[FoundCall]:
    """Return calls in the order in which they were made.

    The numbers of the proxy or the tracer decide where every call has one of its own, for no clock
    can upset them; else the times of start, and where one is unknown, the sequence ids.
    """
    numbers = {found.call.call_index for found in calls}
    if None not in numbers and len(numbers) == len(calls):
        return sorted(calls, key=lambda found: found.call.call_index or 0)
    if all(found.span.start_time is not None for found in calls):
        return sorted(calls, key=lambda f: (f.span.start_time or 0.0, f.span.sequence_id))
    return sorted(calls, key=lambda found: (found.span.sequence_id, found.position))


def _split_by_number(group: Sequence[Sighting]) -> list[Sequence[Sighting]]:
    """Return the spans of each of the proxy's numbers, each other span with the nearest of them."""
    numbered: dict[int, list[Sighting]] = {}
    for sighting in group:
        if sighting.call.call_index is not None:
            numbered.setdefault(sighting.call.call_index, []).append(sighting)
    if len(numbered) < 2:
        return [group]
    starts = sorted((_start(spans[0]), number) for number, spans in numbered.items())
    for sighting in group:
        if sighting.call.call_index is None:
            after = bisect_left(starts, (_start(sighting), -1))
            near = starts[max(after - 1, 0) : after + 1]
            _, number = min(near, key=lambda entry: abs(entry[0] - _start(sighting)))
            numbered[number].append(sighting)
    return list(numbered.values())


def _start(sighting: Sighting) -> float:
    start = sighting.span.start_time
    return -math.inf if start is None else start


def _main_sighting(group: Sequence[Sighting], agents: Sequence[str]) -> Sighting:
    """Return the span that stands for the call: the first one of a wanted agent, else the first."""
    return next((s for s in group if agents and s.agent == agents[0]), group[0])


def _answered(sighting: Sighting) -> bool:
    return _is_answered(sighting.span)


def _is_answered(span: Span) -> bool:
    return span.status.status_code != "ERROR"


def _drop_reason(group: Sequence[Sighting], found: FoundCall) -> CallDropReason | None:
    if not any(map(_answered, group)):
        return CallDropReason.FAILED
    return None if found.call.tokens.is_complete else CallDropReason.NO_TOKEN_IDS


def _merged(main: LLMCall, answered: Sequence[LLMCall]) -> LLMCall:
    """Return the main span's call, with what it lacks from the other spans of the call."""
    with_ids = [call for call in answered if call.tokens.is_complete]
    with_logprobs = [call for call in with_ids if call.tokens.logprobs is not None]
    best = next(iter(with_logprobs or with_ids), main)
    chats = [call.chat for call in (main, best, *answered) if call.chat.prompt]
    indices = [call.call_index for call in (best, *answered) if call.call_index is not None]
    return replace(
        main,
        tokens=best.tokens,
        policy_version=best.policy_version or main.policy_version,
        call_index=indices[0] if indices else None,
        chat=chats[0] if chats else main.chat,
        request=main.request or best.request,
        response=main.response or best.response,
        response_id=main.response_id or best.response_id,
    )
