"""Counts calls, tokens and cost of each rollout, in bounded memory."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agl_core import semconv


@dataclass(frozen=True, slots=True)
class Price:
    """What a model's tokens cost, in any currency for a million tokens."""

    input: float
    output: float

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return what so many tokens cost."""
        return (prompt_tokens * self.input + completion_tokens * self.output) / 1e6


@dataclass(slots=True)
class Usage:
    """What was used so far."""

    calls: int = 0
    failed_calls: int = 0
    """Of these, those whose span is an error; an answer without token ids is one."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """0 where the model has no price."""

    def add(self, other: "Usage") -> None:
        """Count another usage in."""
        self.calls += other.calls
        self.failed_calls += other.failed_calls
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cost += other.cost


class Accounts:
    """Usage by rollout and in total; safe from several threads.

    Args:
        prices: By model; `*` is for every other one.
        max_rollouts: The rollouts that were counted last; earlier ones are in the total only.
    """

    def __init__(self, prices: Mapping[str, Price], max_rollouts: int = 10_000) -> None:
        self._prices = prices
        self._max_rollouts = max_rollouts
        self._lock = threading.Lock()
        self._total = Usage()
        self._is_without_ids = False
        self._by_rollout: OrderedDict[str, Usage] = OrderedDict()

    def count(
        self, rollout_id: str, model: Any, recorded: Mapping[str, Any], *, has_failed: bool
    ) -> None:
        """Count a call.

        Args:
            rollout_id: Its rollout.
            model: The name that was asked for.
            recorded: Attributes of its answer.
            has_failed: Whether its span is an error.
        """
        prompt_tokens = _tokens(recorded, semconv.INPUT_TOKENS)
        completion_tokens = _tokens(recorded, semconv.OUTPUT_TOKENS)
        price = self._prices.get(str(model)) or self._prices.get("*")
        cost = price.of(prompt_tokens, completion_tokens) if price else 0.0
        call = Usage(1, int(has_failed), prompt_tokens, completion_tokens, cost)
        with self._lock:
            self._total.add(call)
            self._by_rollout.setdefault(rollout_id, Usage()).add(call)
            self._by_rollout.move_to_end(rollout_id)
            if len(self._by_rollout) > self._max_rollouts:
                self._by_rollout.popitem(last=False)

    def is_first_without_ids(self) -> bool:
        """Note that a call came without token ids; True for the first one."""
        with self._lock:
            is_first, self._is_without_ids = not self._is_without_ids, True
            return is_first

    def usage(self, rollout_id: str | None = None) -> dict[str, Any]:
        """Return the usage of a rollout, or of all; zeros for a rollout that is not known."""
        with self._lock:
            if rollout_id is None:
                return asdict(self._total)
            return asdict(self._by_rollout.get(rollout_id, Usage()))

    def rollouts(self) -> dict[str, dict[str, Any]]:
        """Return the usage of each rollout that is remembered."""
        with self._lock:
            return {rollout_id: asdict(usage) for rollout_id, usage in self._by_rollout.items()}


def _tokens(recorded: Mapping[str, Any], name: str) -> int:
    value = recorded.get(name)
    return value if type(value) is int else 0
