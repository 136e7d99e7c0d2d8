"""What a run does about rollouts that fail, by kind: try again, then mask, drop the group, or stop.

    failures:
      infra_error: {attempts: 4, delay_seconds: 2, permanent: ["NotFoundError"]}
      agent_error: {then: drop_group, max_fraction: 0.2}
      no_reward: {then: zero}
      min_success_fraction: 0.8

Settings and pure decisions; `runner/shard.py` and `flows/fan_out.py` ask, `trajectory/failed.py`
applies `drop_group` and `zero`.
"""

import re
from collections import Counter
from typing import Literal

from pydantic import Field, field_validator

from agl_core.settings import Settings
from agl_core.types.outcome import FailureKind

_KINDS = (
    FailureKind.AGENT_ERROR,
    FailureKind.TIMEOUT,
    FailureKind.INFRA_ERROR,
    FailureKind.NO_TRACE,
    FailureKind.NO_REWARD,
)
_MIN_GROUPS = 4
"""One bad dataset row must not look like a broken agent (`give_up_after`)."""
_MAX_MESSAGE = 300
"""Characters of a rollout's message in the sentence of a stop."""
_SLACK = 1e-9
"""A share of a whole number of rollouts is met in spite of rounding."""


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return regular expressions as they are.

    Raises:
        ValueError: One is not a regular expression.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return patterns


class FailurePolicy(Settings):
    """What follows a failure of one kind."""

    attempts: int = Field(default=1, ge=1, le=100)
    """Tries of a rollout: this kind is tried again while there were fewer, of whatever kind."""
    delay_seconds: float = Field(default=1.0, ge=0)
    """Wait before the second try; it holds no slot of the shard's `concurrency`."""
    backoff: float = Field(default=2.0, ge=1)
    """Each further wait is so many times longer ..."""
    max_delay_seconds: float = Field(default=60.0, ge=0)
    """... up to this."""
    jitter: float = Field(default=0.5, ge=0, le=1)
    """Share of the wait by which it is made longer or shorter at random."""
    permanent: tuple[str, ...] = ()
    """Regular expressions; where one is found in the failure's message (an exception's begins with
    the name of its type) the rollout is not tried again."""
    then: Literal["mask", "drop_group", "fail"] = "mask"
    """After the last try. `mask`: the rollout takes no part, its group goes on. `drop_group`: none
    of its group reaches the loss (`group_failed`). `fail`: the iteration stops."""
    max_fraction: float = Field(default=1.0, ge=0, le=1)
    """The iteration stops where a larger share of a set's rollouts fails in this way."""

    _permanent_compile = field_validator("permanent")(check_patterns)

    def delay_after(self, attempt: int, message: str, draw: float) -> float | None:
        """Return the seconds to wait before another try; None where there is none.

        Args:
            attempt: Number of the attempt that failed, from 1.
            message: Why it failed.
            draw: Uniform in [-1, 1], for the jitter.
        """
        if attempt >= self.attempts or any(re.search(p, message) for p in self.permanent):
            return None
        delay = min(self.delay_seconds * self.backoff ** (attempt - 1), self.max_delay_seconds)
        return delay * (1 + self.jitter * draw)


class RetriedFailure(FailurePolicy):
    """A failure that another try may get right."""

    attempts: int = Field(default=2, ge=1, le=100)


class InfraFailure(RetriedFailure):
    """The model server, the network or the host failed, not the agent."""

    patterns: tuple[str, ...] = ()
    """Regular expressions. If one is found in the message of an `agent_error` (it begins with the
    name of the exception's type), that attempt counts as `infra_error`."""

    _patterns_compile = field_validator("patterns")(check_patterns)


class NoReward(FailurePolicy):
    """The agent returned and gave no reward."""

    then: Literal["mask", "drop_group", "fail", "zero"] = "mask"  # pyright: ignore[reportIncompatibleVariableOverride] - one more choice; the models are frozen
    """`zero` trains the rollout on reward 0. Its outcome keeps its kind and has no reward; the
    manifest counts it (`rewards_by_policy`)."""


class FailureSettings(Settings):
    """What follows a failed rollout, and how many are too many."""

    agent_error: FailurePolicy = FailurePolicy()
    timeout: RetriedFailure = RetriedFailure()
    infra_error: InfraFailure = InfraFailure()
    no_trace: FailurePolicy = FailurePolicy()
    no_reward: NoReward = NoReward()
    min_success_fraction: float = Field(default=0.5, ge=0, le=1)
    """The iteration stops as soon as fewer of a set's rollouts can still succeed: what is left
    would be a biased sample, since rollouts fail by their task and their length."""
    give_up_after: int = Field(default=16, ge=1)
    """A shard stops once so many of its rollouts, of at least 4 dataset rows, have ended and none
    succeeded."""

    def policy(self, kind: FailureKind) -> FailurePolicy:
        """Return what follows a failure of a kind; a cancelled one is neither tried again nor
        counted against anything but `min_success_fraction`.
        """
        return self.policies().get(kind, FailurePolicy())

    def kind_of(self, kind: FailureKind, message: str) -> FailureKind:
        """Return the kind that a failure counts as: `infra_error.patterns` may change it.

        Args:
            kind: As the exception's type says.
            message: Of the failure.
        """
        if kind is FailureKind.AGENT_ERROR and any(
            re.search(pattern, message) for pattern in self.infra_error.patterns
        ):
            return FailureKind.INFRA_ERROR
        return kind

    def policies(self) -> dict[FailureKind, FailurePolicy]:
        """Return the policies of all kinds that have one."""
        return {kind: getattr(self, kind.value) for kind in _KINDS}

    def most_attempts(self) -> int:
        """Return the largest number of tries that a rollout may have."""
        return max(policy.attempts for policy in self.policies().values())

    def longest_wait_seconds(self) -> float:
        """Return a bound on what a rollout waits between its tries, all together."""
        return sum(
            max(policy.delay_after(n, "", draw=1.0) or 0.0 for policy in self.policies().values())
            for n in range(1, self.most_attempts())
        )

    def identity(self) -> dict[str, str]:
        """Return what decides which rollouts are trained and so must not change within a run."""
        chosen = {kind.value: policy.then for kind, policy in self.policies().items()}
        return {kind: "mask" if then == "fail" else then for kind, then in chosen.items()}


class FailureTally:
    """Counts the ends of a set's rollouts, and says when there were too many failures.

    Args:
        settings: The limits.
        rollout_set: Name of the set, for the sentence.
        expected: Rollouts of the whole set, whoever runs them.
    """

    def __init__(self, settings: FailureSettings, rollout_set: str, expected: int) -> None:
        self._settings = settings
        self._set = rollout_set
        self._expected = expected
        self.kinds: Counter[FailureKind] = Counter()
        """Rollouts by how their last attempt ended."""
        self._failures: Counter[FailureKind] = Counter()
        self._messages: Counter[str] = Counter()
        self._groups: set[int] = set()
        self._fatal = ""

    def add(self, rollout_id: str, group: int, kind: FailureKind, message: str) -> None:
        """Count the end of one rollout; one that is trained on reward 0 is no failure here."""
        self.kinds[kind] += 1
        is_zero = kind is FailureKind.NO_REWARD and self._settings.no_reward.then == "zero"
        if kind is FailureKind.SUCCEEDED or is_zero:
            return
        message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        self._failures[kind] += 1
        self._messages[f"{kind}: {message}"] += 1
        self._groups.add(group)
        if not self._fatal and self._settings.policy(kind).then == "fail":
            self._fatal = f"rollout {rollout_id} ended as {kind}: {message} (failures.{kind}.then)"

    def stop_reason(self) -> str | None:
        """Return why the set must stop, in one sentence; None where it may go on."""
        if self._fatal:
            return f"the rollouts of {self._set} stop: {self._fatal}"
        if not (limit := self._limit()):
            return None
        counts = ", ".join(f"{count} {kind}" for kind, count in self._failures.most_common())
        ((message, times),) = self._messages.most_common(1)
        return (
            f"the rollouts of {self._set} stop: {limit}; {self._failures.total()} of "
            f"{self._expected} failed ({counts}), most often ({times} times) as {message}"
        )

    def _limit(self) -> str:
        """Return the limit that was passed; empty where none was."""
        settings, expected = self._settings, self._expected
        failed = self._failures.total()
        if expected - failed < settings.min_success_fraction * expected - _SLACK:
            share = settings.min_success_fraction
            return f"fewer than failures.min_success_fraction = {share:g} can succeed"
        for kind, policy in settings.policies().items():
            if self._failures[kind] > policy.max_fraction * expected + _SLACK:
                return f"more than failures.{kind}.max_fraction = {policy.max_fraction:g} failed"
        is_hopeless = failed >= settings.give_up_after and failed == self.kinds.total()
        if is_hopeless and len(self._groups) >= _MIN_GROUPS:
            return f"none of the first failures.give_up_after = {settings.give_up_after} succeeded"
        return ""
