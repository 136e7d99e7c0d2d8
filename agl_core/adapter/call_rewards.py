"""Rewards in a table of spans, with the calls that they belong to by the rule of
`agl_core.adapter.rewards`.

Of the many spans only those that may hold a reward are read, and the attributes of calls only where
a reward has links.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from agl_core import semconv
from agl_core.adapter.rewards import CallPlace, EmittedReward, RewardMatchPolicy, match_by_time
from agl_core.emitter.reward import DEFAULT_REWARD_NAME
from agl_core.ledger.spans import read_spans
from agl_core.ledger.tables import REWARDS
from agl_core.types.tracer import Span

_NAMES = (
    *(semconv.REWARD_PREFIX, semconv.AGENTOPS_TASK_OUTPUT, semconv.AGENTOPS_ENTITY_OUTPUT),
    *("reward", semconv.EVALUATION_SCORE),
)
_MAY_HAVE_REWARD = "|".join(rf'"{re.escape(name)}[."]' for name in _NAMES)


def match_call_rewards(
    calls: pa.Table, spans: pa.Table, final_rewards: Sequence[float]
) -> pa.Array:
    """Return the rewards of each call (type `REWARDS`).

    The rollout's final reward is on its last call, whether or not a span holds it. Rewards that
    belong to no call are kept on the first one, as such.

    Args:
        calls: Calls of some attempts, one attempt a rollout (schema `SPANS`), ordered by `index`,
            then by call.
        spans: All spans of these attempts, in any order.
        final_rewards: Of the rollout of each call.
    """
    emitted: defaultdict[int, list[Span]] = defaultdict(list)
    candidates = pc.or_(
        pc.is_valid(spans["reward"]),
        pc.fill_null(pc.match_substring_regex(spans["attributes"], _MAY_HAVE_REWARD), False),
    )
    reward_spans = spans.filter(candidates).sort_by(
        [(name, "ascending") for name in ("index", "end_time", "sequence_id")]
    )
    indices = reward_spans["index"].to_pylist()
    for index, span in zip(indices, read_spans(reward_spans, with_attributes=True), strict=True):
        emitted[index].append(span)
    entries: list[list[dict[str, Any]]] = []
    all_called = read_spans(calls, with_attributes=False)
    for index, begin, end in _rollouts(calls["index"].to_pylist()):
        found, called = emitted[index], all_called[begin:end]
        if any(_has_links(span) for span in found):
            called = read_spans(calls.slice(begin, end - begin), with_attributes=True)
        entries += _match(found, called, final_rewards[begin])
    return pa.array(entries, REWARDS)


def _rollouts(indices: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each rollout with the place of its first call, and that after its last."""
    begin = 0
    for place in range(1, len(indices) + 1):
        if place == len(indices) or indices[place] != indices[begin]:
            yield indices[begin], begin, place
            begin = place


def _has_links(span: Span) -> bool:
    return any(name.startswith(semconv.LINK_PREFIX) for name in span.attributes)


def _match(emitted: list[Span], calls: list[Span], final: float) -> list[list[dict[str, Any]]]:
    """Return the rewards of each call of an attempt."""
    places = [CallPlace(call, place, call.parent_id) for place, call in enumerate(calls)]
    match = match_by_time(emitted, places, [], {}, RewardMatchPolicy.FIRST_OCCURRENCE)
    source = match.source if match.final == final else None
    entries = [
        [entry for reward in attached for entry in _entries(reward, source, matched=True)]
        for attached in match.attached
    ]
    for reward in match.unmatched:
        entries[0] += _entries(reward, source, matched=False)
    if source is None:
        given = EmittedReward("", final, {DEFAULT_REWARD_NAME: final})
        entries[-1] += _entries(given, "", matched=True)
    return entries


def _entries(reward: EmittedReward, source: str | None, *, matched: bool) -> list[dict[str, Any]]:
    """Return one entry for each dimension, the primary one first."""
    primary = next(iter(reward.values))
    values = reward.values | {primary: reward.value}
    return [
        {
            "name": name,
            "value": value,
            "primary": name == primary,
            "final": reward.span_id == source,
            "matched": matched,
        }
        for name, value in values.items()
    ]
