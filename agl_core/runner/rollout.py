"""Run one attempt at one rollout: agent, tracer, deadline -> outcome and spans.

This is the one place where an agent's exceptions become an outcome, its `sys.exit` too. The
store-driven runner and the shard flow both call it. What ends the surrounding task or the process
from outside (CancelledError, KeyboardInterrupt) goes on: whoever cancels decides what to record.
"""

import asyncio
import hashlib
import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from agl_core import semconv
from agl_core.emitter.reward import emit_reward, final_reward
from agl_core.litagent.decorator import FunctionalLitAgent
from agl_core.runner.execution import (
    DeadlineExceeded,
    LeakCounter,
    run_coroutine,
    run_in_thread,
)
from agl_core.runner.failure import classify_exception, describe_exception, format_traceback
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.base import Tracer
from agl_core.types.core import Attempt, AttemptedRollout, RolloutMode
from agl_core.types.outcome import AttemptOutcome, FailureKind
from agl_core.types.resources import PromptTemplate, ProxyLLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """What one attempt left."""

    outcome: AttemptOutcome
    spans: list[ReadableSpan]
    """In the order in which they ended; the root span is the last one."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the agent ended, before its spans are looked at."""

    kind: FailureKind
    reward: float | None = None
    message: str = ""
    traceback: str = ""


def make_attempt_id(rollout_id: str, attempt: int, claim: int = 1) -> str:
    """Return the id of the attempt with this 1-based number, the same on every machine."""
    digest = hashlib.sha256(f"{rollout_id}/{claim}/{attempt}".encode()).hexdigest()
    return f"at-{digest[:8]}"


async def run_attempt(
    agent: FunctionalLitAgent,
    *,
    index: int,
    task: Any,
    rollout_id: str,
    attempt: int,
    llm: ProxyLLM | None,
    tracer: Tracer,
    timeout_seconds: float | None,
    claim: int = 1,
    mode: RolloutMode = "train",
    metadata: dict[str, Any] | None = None,
    prompt_template: PromptTemplate | None = None,
    leaks: LeakCounter | None = None,
) -> AttemptResult:
    """Run the agent once and return how it ended and what it left.

    Args:
        agent: What to run; async in this event loop, sync in a thread.
        index: Position of the rollout among the requests of its set.
        task: The input, passed to the agent as it is.
        rollout_id: The rollout.
        attempt: 1-based number of this try.
        llm: The model behind the recording proxy; the agent gets it bound to this attempt.
        tracer: The tracer that the proxy records to as well.
        timeout_seconds: Deadline of the agent, waiting for a thread included; None for none.
        claim: Number of the shard attempt that makes this try; part of the attempt's id.
        mode: What the rollout is for.
        metadata: For agents that take the rollout.
        prompt_template: The prompt, for agents that take one.
        leaks: Counts agents that run on after their deadline.

    Raises:
        ConfigError: The agent takes a resource that is not given.
        ValueError: This attempt is running already.
    """
    started, clock = time.time(), time.monotonic()
    attempted = _attempted_rollout(
        rollout_id, make_attempt_id(rollout_id, attempt, claim), attempt, task, mode, started
    ).model_copy(update={"metadata": metadata})
    attempt_id = attempted.attempt.attempt_id
    bound = llm.with_attempted_rollout(attempted) if llm else None

    def call() -> Any:
        return agent.call(task, rollout=attempted, llm=bound, prompt_template=prompt_template)

    agent.check_resources(llm=bound, prompt_template=prompt_template)
    with tracer.attempt(rollout_id, attempt_id) as trace:
        ending = await _run_agent(
            agent.is_async(), call, trace, timeout_seconds, leaks or LeakCounter()
        )
        if ending.kind is not FailureKind.SUCCEEDED:
            trace.fail(ending.kind)
    spans = trace.spans()
    ending = _judge(ending, spans)
    outcome = AttemptOutcome(
        index=index,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        attempt=attempt,
        kind=ending.kind,
        reward=ending.reward,
        message=ending.message,
        traceback=ending.traceback,
        started=started,
        duration_seconds=time.monotonic() - clock,
        num_calls=len(_model_calls(spans)),
        prompt_tokens=_sum_attribute(spans, semconv.INPUT_TOKENS),
        completion_tokens=_sum_attribute(spans, semconv.OUTPUT_TOKENS),
    )
    if outcome.kind is not FailureKind.SUCCEEDED:
        logger.warning(
            "attempt ended as %s: rollout=%s attempt=%s: %s",
            outcome.kind,
            rollout_id,
            attempt_id,
            outcome.message,
        )
    return AttemptResult(outcome, spans)


def _attempted_rollout(
    rollout_id: str, attempt_id: str, attempt: int, task: Any, mode: RolloutMode, started: float
) -> AttemptedRollout:
    return AttemptedRollout(
        rollout_id=rollout_id,
        input=task,
        start_time=started,
        mode=mode,
        status="running",
        attempt=Attempt(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=attempt,
            start_time=started,
            status="running",
        ),
    )


async def _run_agent(
    is_async: bool,
    call: Any,
    trace: AttemptTrace,
    timeout_seconds: float | None,
    leaks: LeakCounter,
) -> _Ending:
    """Run the agent and record the reward that it returns."""
    try:
        if is_async:
            returned = await run_coroutine(call(), timeout_seconds, leaks)
        else:
            returned = await run_in_thread(call, timeout_seconds, leaks)
        returned = _returned_reward(returned)
        reward = final_reward(returned, trace.spans())
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        return _Ending(  # nobody cancelled this: it came out of the agent
            FailureKind.AGENT_ERROR,
            message=describe_exception(error),
            traceback=format_traceback(error),
        )
    except DeadlineExceeded:
        return _Ending(
            FailureKind.TIMEOUT, message=f"the agent did not return within {timeout_seconds:g} s"
        )
    except Exception as error:  # noqa: BLE001 - whatever an agent raises becomes its outcome
        return _Ending(
            classify_exception(error),
            message=describe_exception(error),
            traceback=format_traceback(error),
        )
    if returned is not None:
        emit_reward(returned)
    return _Ending(FailureKind.SUCCEEDED, reward)


def _returned_reward(returned: Any) -> float | None:
    """Return the agent's result as a reward.

    Raises:
        TypeError: It is neither None nor a number.
    """
    if returned is None:
        return None
    if isinstance(returned, int | float):
        return float(returned)
    if inspect.iscoroutine(returned):
        returned.close()
        raise TypeError("the agent returned a coroutine without being an async function")
    raise TypeError(
        f"the agent must return a number or None, got {type(returned).__name__}: {returned!r:.80}"
    )


def _judge(ending: _Ending, spans: Sequence[ReadableSpan]) -> _Ending:
    """Demand of an agent that returned: a model call with token ids, and a reward."""
    if ending.kind is not FailureKind.SUCCEEDED:
        return ending
    if reason := _trace_gap(spans):
        return _Ending(FailureKind.NO_TRACE, ending.reward, reason)
    if ending.reward is None:
        message = "the agent neither returned nor emitted a reward"
        return _Ending(FailureKind.NO_REWARD, None, message)
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


def _model_calls(spans: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.name == semconv.LLM_CALL_SPAN]


def _has_token_ids(call: ReadableSpan) -> bool:
    attributes = call.attributes or {}
    ids = (semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS)
    return call.status.is_ok and all(attributes.get(name) for name in ids)


def _sum_attribute(spans: Sequence[ReadableSpan], name: str) -> int:
    values = [(call.attributes or {}).get(name) for call in _model_calls(spans)]
    return sum(value for value in values if isinstance(value, int))
