"""What a rollout of a store came to, judged as the pipeline judges its own."""

from agl_core.emitter.reward import final_reward
from agl_core.failures import FailureSettings
from agl_core.ledger.spans import as_recorded
from agl_core.runner.outcome import JudgedAttempt, TriedRollout, judge_ending
from agl_core.runner.rollout import Ending
from agl_core.types.core import Attempt, Rollout
from agl_core.types.outcome import FailureKind
from agl_core.types.tracer import Span

_KINDS = {
    "timeout": FailureKind.TIMEOUT,
    "cancelled": FailureKind.CANCELLED,
    "unresponsive": FailureKind.INFRA_ERROR,
}
"""By the status of an attempt whose runner gave no kind."""
_SILENT = "its runner gave no sign of life any more"


def judge_stored(
    tried: TriedRollout,
    rollout: Rollout,
    attempt: Attempt | None,
    spans: list[Span],
    failures: FailureSettings | None = None,
    vocabulary_size: int | None = None,
) -> JudgedAttempt:
    """Return the outcome of a store's rollout that has ended, and its spans.

    Args:
        tried: Which attempt it is, for the ledger.
        rollout: As the store has it.
        attempt: Its last one; None where nobody took it.
        spans: All of that attempt.
        failures: The run's; None for the defaults.
        vocabulary_size: Of the policy, where it is known.
    """
    started = attempt.start_time if attempt is not None else rollout.start_time
    ended = rollout.end_time if rollout.end_time is not None else started
    return judge_ending(
        tried,
        _ending(attempt, spans),
        [as_recorded(span, tried.rollout_id) for span in spans],
        started,
        max(0.0, ended - started),
        failures,
        vocabulary_size,
    )


def _ending(attempt: Attempt | None, spans: list[Span]) -> Ending:
    """Return how the agent ended, by what its runner or the store says."""
    if attempt is None:
        return Ending(FailureKind.CANCELLED, "the rollout was cancelled before anybody took it")
    if attempt.status == "succeeded":
        try:
            return Ending(FailureKind.SUCCEEDED, reward=final_reward(None, spans))
        except ValueError as error:
            return Ending(FailureKind.AGENT_ERROR, str(error))
    kind = attempt.failure_kind or _KINDS.get(attempt.status, FailureKind.AGENT_ERROR)
    silent = _SILENT if attempt.status == "unresponsive" else f"the attempt is {attempt.status}"
    return Ending(kind, attempt.failure_message or silent)
