"""The outcome of an attempt as the pipeline records it.

The pipeline trains on what its own proxy recorded, so an agent that returned must leave a model
call with token ids, and a reward.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from agl_core import semconv
from agl_core.failures import FailureSettings
from agl_core.ledger.spans import numeric_annotations
from agl_core.runner.rollout import AttemptResult, Ending
from agl_core.token_check import find_impossible
from agl_core.types.outcome import AttemptOutcome, FailureKind

logger = logging.getLogger(__name__)

_MAX_TOKENS = 2**31 - 1
"""Of one call; what agents record may be any number, and the sum has 64 bits."""


@dataclass(frozen=True, slots=True)
class JudgedAttempt:
    """What one attempt left, for the ledger."""

    outcome: AttemptOutcome
    spans: list[ReadableSpan]
    """In the order in which they ended; the root span is the last one."""


@dataclass(frozen=True, slots=True)
class TriedRollout:
    """Names one attempt."""

    index: int
    """Position of the rollout among the requests of its set."""
    rollout_id: str
    attempt_id: str
    attempt: int
    """1-based number of the attempt."""


def make_attempt_id(rollout_id: str, attempt: int, claim: int = 1) -> str:
    """Return the id of the attempt with this 1-based number, the same on every machine."""
    digest = hashlib.sha256(f"{rollout_id}/{claim}/{attempt}".encode()).hexdigest()
    return f"at-{digest[:8]}"


def judge_attempt(
    result: AttemptResult,
    index: int,
    failures: FailureSettings | None = None,
    vocabulary_size: int | None = None,
) -> JudgedAttempt:
    """Return the outcome of an attempt and its spans.

    Args:
        result: What the attempt left.
        index: Position of the rollout among the requests of its set.
        failures: The run's; None for the defaults.
        vocabulary_size: Of the policy, where it is known.
    """
    ending, attempt = result.ending, result.rollout.attempt
    if ending.kind is FailureKind.SUCCEEDED and result.returned_spans:
        message = "the agent returned spans; the pipeline takes those that its tracer recorded"
        ending = replace(ending, kind=FailureKind.AGENT_ERROR, reward=None, message=message)
    tried = TriedRollout(index, result.rollout.rollout_id, attempt.attempt_id, attempt.sequence_id)
    return judge_ending(
        tried,
        ending,
        result.spans,
        result.started,
        result.duration_seconds,
        failures,
        vocabulary_size,
    )


def judge_ending(
    tried: TriedRollout,
    ending: Ending,
    spans: list[ReadableSpan],
    started: float,
    duration_seconds: float,
    failures: FailureSettings | None = None,
    vocabulary_size: int | None = None,
) -> JudgedAttempt:
    """Return the outcome of an attempt that ended so, and its spans.

    Args:
        tried: Which attempt it is.
        ending: How its agent ended.
        spans: All of it.
        started: UTC epoch seconds.
        duration_seconds: How long it took.
        failures: The run's; None for the defaults.
        vocabulary_size: Of the policy, where it is known.
    """
    judged = _judge(ending, spans, vocabulary_size)
    judged = replace(
        judged, kind=(failures or FailureSettings()).kind_of(judged.kind, judged.message)
    )
    if judged.kind is not ending.kind:
        logger.warning(
            "attempt counts as %s: rollout=%s attempt=%s: %s",
            judged.kind,
            tried.rollout_id,
            tried.attempt_id,
            judged.message,
        )
    outcome = AttemptOutcome(
        index=tried.index,
        rollout_id=tried.rollout_id,
        attempt_id=tried.attempt_id,
        attempt=tried.attempt,
        kind=judged.kind,
        reward=judged.reward,
        message=judged.message,
        traceback=judged.traceback,
        started=started,
        duration_seconds=duration_seconds,
        num_calls=len(_model_calls(spans)),
        prompt_tokens=_sum_attribute(spans, semconv.INPUT_TOKENS),
        completion_tokens=_sum_attribute(spans, semconv.OUTPUT_TOKENS),
    )
    return JudgedAttempt(outcome, spans)


def outcome_row(attempt: JudgedAttempt, *, final: bool) -> dict[str, Any]:
    """Return an attempt as a row of the ledger (schema `OUTCOMES`).

    Args:
        attempt: What it left.
        final: Whether it decides its rollout.
    """
    notes = json.dumps(numeric_annotations(attempt.spans), sort_keys=True)
    return attempt.outcome.model_dump(mode="json") | {"annotations": notes, "final": final}


def _judge(ending: Ending, spans: Sequence[ReadableSpan], vocabulary_size: int | None) -> Ending:
    """Demand of an agent that returned: a model call with token ids, none with impossible ones, and
    a reward. Of one that failed after its last model call was refused, say what the server said.
    """
    if ending.kind is not FailureKind.SUCCEEDED:
        reason = _last_refusal(spans)
        is_new = reason and reason not in ending.message
        return replace(ending, message=f"{ending.message} ({reason})") if is_new else ending
    if reason := _trace_gap(spans) or _impossible_call(spans, vocabulary_size):
        return replace(ending, kind=FailureKind.NO_TRACE, reward=None, message=reason)
    if ending.reward is None:
        message = "the agent neither returned nor emitted a reward"
        return replace(ending, kind=FailureKind.NO_REWARD, message=message)
    return ending


def _trace_gap(spans: Sequence[ReadableSpan]) -> str | None:
    """Return why there is nothing to train on, or None where some call has token ids."""
    calls = _model_calls(spans)
    if not calls:
        return "no model call was recorded; did the agent call the model at llm.endpoint?"
    if any(_has_token_ids(call) for call in calls):
        return None
    reasons = sorted({call.status.description or "no reason recorded" for call in calls})
    return f"{len(calls)} model calls, none with token ids: {'; '.join(reasons[:3])}"


def _impossible_call(spans: Sequence[ReadableSpan], vocabulary_size: int | None) -> str | None:
    """Return why some call cannot be trained on, whatever recorded it: its ids or log-probs are
    none of the policy's, or do not pair up though the call counts as whole.
    """
    for number, call in enumerate(_model_calls(spans)):
        attributes = call.attributes or {}
        reason = find_impossible(attributes, vocabulary_size)
        if reason is None and _has_token_ids(call):
            ids, logprobs = (
                attributes.get(name) for name in (semconv.RESPONSE_TOKEN_IDS, semconv.LOGPROBS)
            )
            found = len(logprobs) if isinstance(logprobs, Sequence) else 0
            if isinstance(ids, Sequence) and len(ids) != found:
                reason = f"{len(ids)} response token ids but {found} log-probs"
        if reason is not None:
            index = attributes.get(semconv.CALL_INDEX, number)
            return f"model call {index} cannot be trained on: {reason}"
    return None


def _last_refusal(spans: Sequence[ReadableSpan]) -> str | None:
    """Return what the model server said where it refused the last call, or None."""
    calls = _model_calls(spans)
    if not calls or calls[-1].status.is_ok:
        return None
    status = (calls[-1].attributes or {}).get(semconv.HTTP_STATUS)
    return calls[-1].status.description if isinstance(status, int) and status >= 400 else None


def _model_calls(spans: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.name == semconv.LLM_CALL_SPAN]


def _has_token_ids(call: ReadableSpan) -> bool:
    attributes = call.attributes or {}
    ids = (semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS)
    return call.status.is_ok and all(attributes.get(name) for name in ids)


def _sum_attribute(spans: Sequence[ReadableSpan], name: str) -> int:
    values = [(call.attributes or {}).get(name) for call in _model_calls(spans)]
    return sum(value for value in values if type(value) is int and 0 <= value <= _MAX_TOKENS)
