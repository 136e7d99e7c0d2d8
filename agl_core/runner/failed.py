"""Rollouts that failed: what is shown of one, and whether those of a set are too many."""

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.errors import IterationStopped
from agl_core.failures import FailureSettings, FailureTally
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.types.outcome import AttemptOutcome, FailureKind

MAX_SHOWN = 50
"""Failed rollouts of a shard that are shown one by one; the others are counted by kind."""


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout whose last attempt did not succeed."""

    rollout_id: str
    kind: str
    attempts: int
    message: str
    last_span: str
    """Name, status and duration of the span that ended last, apart from the root of the attempt;
    empty where there is none."""
    task_run: str
    """Id of its task run; empty outside Prefect."""


def describe_failed(
    outcome: AttemptOutcome, spans: Sequence[ReadableSpan], task_run: str = ""
) -> FailedRollout:
    """Return what is shown of a failed rollout.

    Args:
        outcome: Of its last attempt.
        spans: Of this attempt, in the order in which they ended; the root span is the last one.
        task_run: Id of the task run that made the attempt.
    """
    return FailedRollout(
        rollout_id=outcome.rollout_id,
        kind=outcome.kind.value,
        attempts=outcome.attempt,
        message=outcome.message,
        last_span=_in_short(spans[-2]) if len(spans) > 1 else "",
        task_run=task_run,
    )


def _in_short(span: ReadableSpan) -> str:
    status = span.status.status_code.name
    if span.status.description:
        status += f": {span.status.description}"
    seconds = ((span.end_time or 0) - (span.start_time or 0)) / 1e9
    return f"{span.name}, {status}, {seconds:.2f} s"


def check_failures(rollouts: RolloutSet, settings: FailureSettings) -> None:
    """Hold what is recorded of a set against the run's limits.

    Raises:
        IterationStopped: More of its rollouts failed than the settings permit.
    """
    requests = rollouts.read_requests(["index", "group"])
    groups = dict(zip(requests["index"].to_pylist(), requests["group"].to_pylist(), strict=True))
    tally = FailureTally(settings, rollouts.name, len(requests))
    outcomes = rollouts.outcomes().select(["index", "rollout_id", "kind", "message", "final"])
    for row in outcomes.filter(outcomes["final"]).to_pylist():
        kind = FailureKind(row["kind"])
        tally.add(row["rollout_id"], groups[row["index"]], kind, row["message"])
    if reason := tally.stop_reason():
        raise IterationStopped(reason)
