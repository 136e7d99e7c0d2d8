"""Spans of one attempt to triplets: prompt, response and reward of each model call, in the order in
which the calls were made.

What gives no triplet is in the report, with its reason: `adapt` returns the triplets alone and logs
the rest, `adapt_with_report` returns both. A triplet has token ids, always: a call without them
could only become a row of length zero. The last triplet's reward is the attempt's final reward
(`agl_core.emitter.reward`), whatever else was emitted; see `agl_core.adapter.rewards`.

The pipeline's own path, over tables of many attempts, is `agl_core.adapter.columns`.
"""

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.adapter.base import TraceToTripletBase, as_spans
from agl_core.adapter.calls import (
    CallDropReason,
    CallSearch,
    DroppedCall,
    FoundCall,
    Sighting,
    call_key,
    only_ones,
    sight_calls,
    sort_out,
)
from agl_core.adapter.chat import find_image_urls
from agl_core.adapter.llm_call import Dialect, find_dialect, read_attributes
from agl_core.adapter.rewards import (
    EmittedReward,
    RewardMatch,
    RewardMatchPolicy,
    match_by_sequence,
    match_by_time,
)
from agl_core.adapter.span_tree import TraceTree
from agl_core.types.core import Triplet
from agl_core.types.tracer import Span

__all__ = [
    "AdaptResult",
    "CallDropReason",
    "DroppedCall",
    "EmittedReward",
    "LlmProxyTraceToTriplet",
    "ReportingAdapter",
    "RewardMatchPolicy",
    "TraceTree",
    "TracerTraceToTriplet",
    "TripletReport",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TripletReport:
    """What became of an attempt's spans: `num_llm_calls == triplets + len(dropped)`."""

    num_spans: int
    num_llm_calls: int
    """Each call once, however many spans recorded it."""
    num_duplicates: int
    """Spans that recorded a call once more."""
    dropped: list[DroppedCall]
    final_reward: float | None
    reward_source: str | None
    """Id of the span whose reward is the final one."""
    unmatched_rewards: list[EmittedReward]
    """Rewards that are on no triplet."""

    def num_dropped(self) -> dict[CallDropReason, int]:
        """Return how many calls were dropped for each reason."""
        return dict(Counter(drop.reason for drop in self.dropped))

    @property
    def num_without_ids(self) -> int:
        """How many answered calls of the wanted agents have no token ids."""
        return self.num_dropped().get(CallDropReason.NO_TOKEN_IDS, 0)


@dataclass(frozen=True, slots=True)
class AdaptResult:
    """Triplets of one attempt, and what did not become one."""

    triplets: list[Triplet]
    report: TripletReport


class ReportingAdapter(TraceToTripletBase):
    """An adapter that accounts for every call and every reward."""

    warns_of_missing_ids = True
    """Whether `adapt` warns of calls without token ids."""

    def adapt(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> list[Triplet]:
        """Return the attempt's triplets in the order of the calls; warn where some are missing.

        Args:
            source: Spans of one attempt, in the order in which the store returns them.

        Raises:
            ValueError: The final reward is NaN or infinite.
        """
        result = self.adapt_with_report(source)
        report = result.report
        unexpected = report.num_without_ids if self.warns_of_missing_ids else 0
        if unexpected or (report.num_llm_calls and not result.triplets):
            logger.warning(
                "%d model calls give %d triplets, the rest %s: rollout=%s (no_token_ids: does the "
                "server return token ids, and does the client library keep them?)",
                report.num_llm_calls,
                len(result.triplets),
                {str(reason): count for reason, count in report.num_dropped().items()},
                next((span.rollout_id for span in source if isinstance(span, Span)), ""),
            )
        return result.triplets

    @abstractmethod
    def adapt_with_report(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> AdaptResult:
        """Return the attempt's triplets in the order of the calls, and what gave none.

        Args:
            source: Spans of one attempt, in the order in which the store returns them; none give no
                triplets.

        Raises:
            ValueError: The final reward is NaN or infinite.
        """


class TracerTraceToTriplet(ReportingAdapter):
    """Triplets from the spans of a tracer: the tree says which agent made a call."""

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = r"openai\.chat\.completion",
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy | str = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        """Set what counts as a call.

        Args:
            repair_hierarchy: Whether spans that float at the top move under those they ran in.
            llm_call_match: Regular expression, found anywhere in the name of a call's span.
            agent_match: Regular expression on the name of the nearest agent around a call; None for
                calls of any agent.
            exclude_llm_call_in_reward: Whether calls made to compute a reward are left out.
            reward_match: Which calls a reward may follow.
            _skip_empty_token_spans: Whether calls without token ids are expected, so that leaving
                them out is worth no warning. They are left out, and counted, either way.

        Raises:
            ValueError: There is no such policy for rewards.
        """
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = RewardMatchPolicy(reward_match)
        self.warns_of_missing_ids = not _skip_empty_token_spans

    def adapt_with_report(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> AdaptResult:
        """Return the attempt's triplets in the order of the calls, and what gave none."""
        spans = as_spans(source)
        if not spans:
            return AdaptResult([], TripletReport(0, 0, 0, [], None, None, []))
        tree = TraceTree.from_spans(spans)
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        positions = {span.span_id: position for position, span in enumerate(spans)}
        search = sort_out(
            sight_calls(tree, positions, self.llm_call_match).values(),
            agent_match=self.agent_match,
            skip_in_reward=self.exclude_llm_call_in_reward,
        )
        parents = {child.id: node.id for node in tree.walk() for child in node.children}
        rewards = match_by_time(spans, search.kept, search.without_ids, parents, self.reward_match)
        triplets = [
            _make_triplet(found, attached)
            for found, attached in zip(search.kept, rewards.attached, strict=True)
        ]
        return AdaptResult(triplets, _make_report(spans, search, rewards))


class LlmProxyTraceToTriplet(ReportingAdapter):
    """Triplets from the spans of a proxy alone, by sequence ids: no tree and no clock is read.

    Understood are the spans of our proxy and of LiteLLM's.
    """

    def adapt_with_report(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> AdaptResult:
        """Return the attempt's triplets by sequence id, and what gave none."""
        spans = as_spans(source)
        recorded = [
            (position, span, read_attributes(span.attributes, dialect))
            for position, span in sorted(enumerate(spans), key=_sequence_order)
            if (dialect := find_dialect(span)) is Dialect.AGL or dialect is Dialect.LITELLM
        ]
        anonymous = [
            (span, span.parent_id or "") for _, span, call in recorded if not call.response_id
        ]
        lonely = only_ones(anonymous)
        keys: dict[str, str] = {}
        sightings: dict[str, list[Sighting]] = {}
        for position, span, call in recorded:
            outer = keys.get(span.parent_id or "") if span.span_id in lonely else None
            key = call_key(span, call.response_id, outer)
            keys[span.span_id] = key
            sightings.setdefault(key, []).append(Sighting(span, position, span.parent_id, call))
        search = sort_out(sightings.values(), agent_match=None, skip_in_reward=False)
        kept = sorted(search.kept, key=lambda found: _sequence_order((found.position, found.span)))
        rewards = match_by_sequence(spans, kept, search.without_ids)
        triplets = [
            _make_triplet(found, attached, ids_only=True)
            for found, attached in zip(kept, rewards.attached, strict=True)
        ]
        return AdaptResult(triplets, _make_report(spans, search, rewards))


def _sequence_order(placed: tuple[int, Span]) -> tuple[int, float, int]:
    position, span = placed
    return span.sequence_id, span.start_time or 0.0, position


def _make_triplet(
    found: FoundCall, rewards: Sequence[EmittedReward], *, ids_only: bool = False
) -> Triplet:
    """Return the triplet of a call; the last of its rewards is the one to train on."""
    call = found.call
    prompt: dict[str, Any] = {"token_ids": call.tokens.prompt_ids}
    response: dict[str, Any] = {"token_ids": call.tokens.response_ids}
    metadata: dict[str, Any] = {"response_id": call.response_id, "span_id": found.span.span_id}
    if call.tokens.logprobs is not None:
        response["logprobs"] = call.tokens.logprobs
    if call.policy_version is not None:
        metadata["policy_version"] = call.policy_version
    if rewards:
        metadata["rewards"] = [asdict(reward) for reward in rewards]
    if not ids_only:
        prompt["raw_content"] = call.chat.prompt
        prompt["image_urls"] = find_image_urls(call.chat.prompt)
        response["raw_content"] = call.chat.completions
        metadata["request"] = call.request
        metadata["response"] = call.response
        metadata["agent_name"] = found.agent
    return Triplet(
        prompt=prompt,
        response=response,
        reward=rewards[-1].value if rewards else None,
        metadata=metadata,
    )


def _make_report(spans: Sequence[Span], search: CallSearch, rewards: RewardMatch) -> TripletReport:
    num_calls = len(search.kept) + len(search.dropped)
    return TripletReport(
        num_spans=len(spans),
        num_llm_calls=num_calls,
        num_duplicates=search.num_spans() - num_calls,
        dropped=search.dropped,
        final_reward=rewards.final,
        reward_source=rewards.source,
        unmatched_rewards=rewards.unmatched,
    )
