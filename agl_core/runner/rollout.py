"""Run one attempt at one rollout: agent, tracer, deadline -> its end and its spans.

This is the one place where an agent's exceptions become a value, its `sys.exit` too. The
store-driven runner and the pipeline's shard both call it; what an attempt needs to be trained on is
for the callers to say (`agl_core.runner.outcome` does for the shard). What ends the surrounding
task or the process from outside (CancelledError, KeyboardInterrupt) goes on: whoever cancels
decides what to record.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.emitter.reward import emit_reward, final_reward
from agl_core.litagent.litagent import LitAgent
from agl_core.runner.children import attempt_children
from agl_core.runner.execution import (
    DeadlineExceeded,
    LeakCounter,
    call_contained,
    run_coroutine,
    run_in_thread,
)
from agl_core.runner.failure import (
    classify_exception,
    describe_exception,
    format_traceback,
    locate_exception,
    locate_function,
)
from agl_core.runner.hooks import HookCalls
from agl_core.runner.returned import Returned, ReturnedSpans, read_returned
from agl_core.store.base import LightningStore
from agl_core.tracer.attempt_trace import AttemptTrace, ForeignTrace
from agl_core.tracer.base import Tracer
from agl_core.tracer.current import get_active_tracer
from agl_core.types.core import AttemptedRollout
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import NamedResources

if TYPE_CHECKING:  # the pool builds on this module
    from agl_core.runner.agent_pool import AgentPool

logger = logging.getLogger(__name__)

_MAIN_THREAD = (
    "sync agents run in threads, where signals cannot be used: set rollout.isolation: process, "
    "which runs each agent in the main thread of its own process, or make the agent async"
)
RewardSource = Literal["returned", "returned_spans", "emitted"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How the agent ended."""

    kind: FailureKind
    message: str = ""
    """What went wrong in one sentence; empty where it succeeded."""
    reward: float | None = None
    """Final reward; None unless the agent gave one."""
    traceback: str = ""
    error: BaseException | None = field(default=None, compare=False)
    """What it raised."""
    returned: Returned = field(default_factory=Returned)


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """What one attempt left."""

    rollout: AttemptedRollout
    ending: Ending
    trace: AttemptTrace
    started: float
    """UTC epoch seconds."""
    duration_seconds: float

    @property
    def spans(self) -> list[ReadableSpan]:
        """Recorded spans in the order in which they ended; the root span is the last one."""
        return self.trace.spans()

    @property
    def returned_spans(self) -> ReturnedSpans:
        """Spans that the agent returned instead of having them recorded."""
        return self.ending.returned.spans

    @property
    def reward_source(self) -> RewardSource | None:
        """Where the final reward is from."""
        if self.ending.reward is None:
            return None
        if self.ending.returned.reward is not None:
            return "returned"
        return "returned_spans" if self.returned_spans else "emitted"


class AttemptCancelled(asyncio.CancelledError):
    """The cancellation of an attempt, with what it left until then."""

    def __init__(self, result: AttemptResult) -> None:
        super().__init__()
        self.result = result


async def run_attempt(
    agent: LitAgent[Any],
    rollout: AttemptedRollout,
    *,
    resources: NamedResources,
    tracer: Tracer,
    timeout_seconds: float | None,
    store: LightningStore | None = None,
    hooks: HookCalls | None = None,
    leaks: LeakCounter | None = None,
    pool: "AgentPool | None" = None,
) -> AttemptResult:
    """Run the agent once and return how it ended and what it left.

    Args:
        agent: What to run; async in this event loop, sync in a thread.
        rollout: What it runs: input, mode and attempt.
        resources: What the agent works with; a function gets its model bound to this attempt.
        tracer: The tracer that the proxy records to as well.
        timeout_seconds: Deadline of the agent, waiting for a thread included; None for none.
        store: Where the spans go, all of them before this returns; None to keep them in memory
            (unless the tracer was set up with a store).
        hooks: Called inside the trace, before and after the agent.
        leaks: Counts agents that run on after their deadline.
        pool: Runs the agent in a process of its own, which is killed at the deadline.

    Raises:
        AttemptCancelled: This code was cancelled; a CancelledError with what was left until then.
        ConfigError: The agent takes a resource that is not given.
        ValueError: This attempt is running already.
        StoreError: The store refuses the spans.
        TransientError: They could not be stored in time.
    """
    started, clock = time.time(), time.monotonic()
    agent.check_resources(resources)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    trace: AttemptTrace | None = None
    try:
        async with tracer.trace_context(**ids, **_store_argument(tracer, store)) as given:
            is_ours = isinstance(given, AttemptTrace)
            trace = given if is_ours else ForeignTrace(**ids, last_trace=tracer.get_last_trace)
            if hooks is not None:
                await hooks.trace_start()
            try:
                if pool is not None:
                    ending = await pool.run(rollout, resources, trace, timeout_seconds)
                else:
                    ending = await run_agent(
                        agent, rollout, resources, trace, timeout_seconds, leaks or LeakCounter()
                    )
            except asyncio.CancelledError:
                trace.fail(FailureKind.CANCELLED)
                raise
            if ending.kind is not FailureKind.SUCCEEDED:
                trace.fail(ending.kind)
                logger.warning(
                    "attempt ended as %s: rollout=%s attempt=%s: %s",
                    ending.kind,
                    rollout.rollout_id,
                    rollout.attempt.attempt_id,
                    ending.message,
                )
            if hooks is not None:
                await hooks.trace_end()
    except asyncio.CancelledError as error:
        if trace is None:
            raise
        ending = Ending(FailureKind.CANCELLED, "the attempt was cancelled")
        left = AttemptResult(rollout, ending, trace, started, time.monotonic() - clock)
        raise AttemptCancelled(left) from error
    return AttemptResult(rollout, ending, trace, started, time.monotonic() - clock)


def _store_argument(tracer: Tracer, store: LightningStore | None) -> dict[str, Any]:
    """Return the argument that names the store, if the tracer's `trace_context` takes it."""
    parameters = inspect.signature(tracer.trace_context).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {"store": store} if takes_any or "store" in parameters else {}


async def run_agent(
    agent: LitAgent[Any],
    rollout: AttemptedRollout,
    resources: NamedResources,
    trace: AttemptTrace,
    timeout_seconds: float | None,
    leaks: LeakCounter,
) -> Ending:
    """Run the agent in this process and record the reward that it returns.

    Args:
        agent: What to run; async in this event loop, sync in a thread.
        rollout: What it runs.
        resources: What it works with.
        trace: Of the attempt.
        timeout_seconds: Deadline; None for none.
        leaks: Counts agents that run on after it.
    """
    call = functools.partial(agent.call, resources, rollout)
    try:
        with attempt_children() as children:
            try:
                if agent.is_async():
                    value = await run_coroutine(call(), timeout_seconds, leaks)
                else:
                    value = await run_in_thread(call, timeout_seconds, leaks)
            except (asyncio.CancelledError, DeadlineExceeded):
                children.give_up()
                raise
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        return _raised(error)  # nobody cancelled this: it came out of the agent
    except DeadlineExceeded:
        message = f"the agent did not return within {timeout_seconds:g} s"
        return Ending(FailureKind.TIMEOUT, message, error=TimeoutError(message))
    except Exception as error:  # noqa: BLE001 - whatever an agent raises becomes its outcome
        return _raised(error)
    return _returned(value, trace, agent.source(rollout.mode))


def run_sync_agent(
    agent: LitAgent[Any],
    rollout: AttemptedRollout,
    resources: NamedResources,
    trace: AttemptTrace,
) -> Ending:
    """Run a sync agent in the calling thread, without a deadline, and record its reward.

    Args:
        agent: What to run.
        rollout: What it runs.
        resources: What it works with.
        trace: Of the attempt.
    """
    call = functools.partial(agent.call, resources, rollout)
    try:
        with attempt_children():  # at the deadline the whole process is killed
            value = contextvars.copy_context().run(call_contained, call)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - becomes its outcome
        return _raised(error)
    return _returned(value, trace, agent.source(rollout.mode))


def _returned(value: Any, trace: AttemptTrace, source: Any) -> Ending:
    """Return the ending of an agent that returned, and record the reward that it gave.

    Args:
        value: What it returned.
        trace: Of the attempt.
        source: The agent's function, to name in a message.
    """
    try:
        returned = read_returned(value)
        reward = final_reward(returned.reward, [*trace.spans(), *returned.spans])
    except Exception as error:  # noqa: BLE001 - the value's own code may raise anything
        return _raised(error, locate_function(source))
    if returned.reward is not None and get_active_tracer() is not None:
        emit_reward(returned.reward)
    return Ending(FailureKind.SUCCEEDED, reward=reward, returned=returned)


def _raised(error: BaseException, where: str = "") -> Ending:
    """Return the ending of an agent that raised; an error of its own says where in its code.

    Args:
        error: What it raised, or what was wrong with what it returned.
        where: The place; empty for that of the exception.
    """
    kind, message = classify_exception(error), describe_exception(error)
    if kind is FailureKind.AGENT_ERROR and (where := where or locate_exception(error)):
        message = f"{message} ({where})"
    if isinstance(error, ValueError) and "main thread of the main interpreter" in message:
        message = f"{message}; {_MAIN_THREAD}"
    return Ending(
        kind,
        message=message,
        traceback=format_traceback(error),
        error=error,
    )
