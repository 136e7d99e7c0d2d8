"""One attempt for a store: run it, store what it left, end it there with a reason.

    resources, proxies --> hooks --> run_attempt (deadline, trace, spans to the store)
        --> returned spans --> hooks --> the attempt's status, failure kind and numbers

Each attempt ends in a final status, whatever happens to it: a failure of the agent or of the
infrastructure, missing resources, its deadline, a cancellation, an exception that ends the process.
An attempt that made no model call, or has no reward, is no failure here: what is needed to learn
from it is for the algorithm to say.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from agl_core.emitter.reward import emit_reward, final_reward, find_final_reward
from agl_core.errors import ConfigError, StoreError
from agl_core.litagent.litagent import LitAgent
from agl_core.runner.base import EVENT_POLL_SECONDS, StopEvent
from agl_core.runner.diagnostics import diagnose
from agl_core.runner.execution import LeakCounter
from agl_core.runner.failure import classify_exception, describe_exception, format_traceback
from agl_core.runner.heartbeat import Heartbeat
from agl_core.runner.hooks import HookCalls
from agl_core.runner.recording import RecordingProxies
from agl_core.runner.returned import to_records
from agl_core.runner.rollout import AttemptResult, Ending, run_attempt
from agl_core.store.base import UNSET, LightningStore
from agl_core.tracer.base import Tracer
from agl_core.types.core import AttemptedRollout, AttemptStatus, Hook
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import NamedResources
from agl_core.types.tracer import Span

logger = logging.getLogger(__name__)

_LAST_WORD_SECONDS = 10.0
"""How long an agent may take to stop, and its end to be recorded, while this runner is stopped."""
_STATUSES: Final[Mapping[FailureKind, AttemptStatus]] = {
    FailureKind.SUCCEEDED: "succeeded",
    FailureKind.TIMEOUT: "timeout",
    FailureKind.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class StoredAttempts:
    """Runs attempts of one worker; several at once may be under way."""

    agent: LitAgent[Any]
    runner: Any
    """For hooks."""
    tracer: Tracer
    store: LightningStore
    hooks: Sequence[Hook]
    leaks: LeakCounter
    proxies: RecordingProxies

    async def run(
        self, rollout: AttemptedRollout, heartbeat: Heartbeat, event: StopEvent | None = None
    ) -> Ending:
        """Run an attempt, end it in the store, and return how it ended.

        Args:
            rollout: With the attempt.
            heartbeat: Keeps the attempt's lease, and says when the store has ended it.
            event: Set from elsewhere to cancel it.

        Raises:
            StoreError: The store refuses its end.
            TransientError: The store cannot be reached; the attempt's lease will expire.
        """
        task = asyncio.create_task(self._run(rollout))
        try:
            with heartbeat.keeping(rollout, task.cancel):
                await _wait(task, event)
            ending, numbers = (
                (Ending(FailureKind.CANCELLED, "the attempt was stopped"), {})
                if task.cancelled()
                else task.result()
            )
        except BaseException as error:
            await self._say_stopped(rollout, task, error)
            raise
        await self._end(rollout, ending, numbers)
        return ending

    async def _run(self, rollout: AttemptedRollout) -> tuple[Ending, dict[str, Any]]:
        """Run the attempt and store its spans; an error of ours is an ending too."""
        try:
            resources = await self._resources_of(rollout)
            async with self.proxies.opened(rollout, resources) as given:
                return await self._run_with(rollout, given)
        except Exception as error:  # noqa: BLE001 - becomes the end of the attempt
            return _failed(error), {}

    async def _run_with(
        self, rollout: AttemptedRollout, resources: NamedResources
    ) -> tuple[Ending, dict[str, Any]]:
        calls = HookCalls(self.hooks, self.agent, self.runner, self.tracer, rollout)
        spans: Sequence[Span] | None = None
        await calls.rollout_start()
        try:
            result = await run_attempt(
                self.agent,
                rollout,
                resources=resources,
                tracer=self.tracer,
                timeout_seconds=rollout.config.timeout_seconds,
                store=self.store,
                hooks=calls,
                leaks=self.leaks,
            )
            spans = await self._spans_of(result)
            ending = result.ending
            if ending.kind is FailureKind.SUCCEEDED:  # readers of the store see its order
                ending = replace(ending, reward=final_reward(None, spans))
            return ending, diagnose(replace(result, ending=ending), spans)
        except Exception as error:  # noqa: BLE001 - becomes the end of the attempt
            return _failed(error), {}
        finally:
            await calls.rollout_end(self._recorded(rollout) if spans is None else spans)

    async def _resources_of(self, rollout: AttemptedRollout) -> NamedResources:
        """Return what the rollout is given.

        Raises:
            RuntimeError: The store does not have it.
        """
        if rollout.resources_id is None:
            update, wanted = await self.store.get_latest_resources(), "has no resources yet"
        else:
            update = await self.store.get_resources_by_id(rollout.resources_id)
            wanted = f"does not have the resources {rollout.resources_id}"
        if update is None:
            raise RuntimeError(
                f"Failed to fetch resources: rollout {rollout.rollout_id} "
                f"cannot run: the store {wanted}"
            )
        return update.resources

    async def _spans_of(self, result: AttemptResult) -> list[Span]:
        """Return all spans of the attempt in the store's order, after storing those that the
        tracer did not record.
        """
        recorded = sorted(result.trace.recorded(), key=lambda span: span.sequence_id)
        known = {span.span_id for span in recorded}
        returned = [
            span
            for span in await to_records(result.returned_spans, result.trace, self.store)
            if span.span_id not in known
        ]
        reward = result.ending.returned.reward
        if reward is not None and find_final_reward(recorded) != reward:
            returned += await to_records(  # the tracer keeps nothing, or no more
                [emit_reward(reward, propagate=False)], result.trace, self.store
            )
        if returned:
            await self.store.add_many_spans(returned)
        return sorted(recorded + returned, key=lambda span: span.sequence_id)

    def _recorded(self, rollout: AttemptedRollout) -> list[Span]:
        """Return what was recorded of an attempt that did not get to its end."""
        attempt_id = rollout.attempt.attempt_id
        return [span for span in self.tracer.get_last_trace() if span.attempt_id == attempt_id]

    async def _end(
        self,
        rollout: AttemptedRollout,
        ending: Ending,
        numbers: Mapping[str, Any],
        *,
        status: AttemptStatus | None = None,
    ) -> None:
        """End the attempt in the store, where it may have ended already."""
        succeeded = ending.kind is FailureKind.SUCCEEDED
        status = status or _STATUSES.get(ending.kind, "failed")
        metadata = {**(rollout.attempt.metadata or {}), **numbers}
        attempt = await self.store.update_attempt(
            rollout.rollout_id,
            rollout.attempt.attempt_id,
            status=status,
            metadata=metadata or UNSET,
            failure_kind=None if succeeded else ending.kind,
            failure_message=None if succeeded else ending.message,
        )
        if attempt.status != status:
            logger.info(
                "attempt ended as %s, which the store has as %s: rollout=%s attempt=%s",
                status,
                attempt.status,
                rollout.rollout_id,
                attempt.attempt_id,
            )

    async def _say_stopped(
        self, rollout: AttemptedRollout, task: asyncio.Task[Any], error: BaseException
    ) -> None:
        """End an attempt whose runner is stopped, also if it is told to stop once more meanwhile;
        what stops it goes on in any case.

        It ends as that of a killed runner does, so that it is retried where the config says so.
        """
        task.cancel()
        message = f"the runner was stopped: {describe_exception(error)}"
        last_word = asyncio.create_task(self._say(rollout, task, message))
        until = time.monotonic() + _LAST_WORD_SECONDS
        while not last_word.done() and (left := until - time.monotonic()) > 0:
            with suppress(asyncio.CancelledError):  # asyncio.run cancels us, and so does our runner
                await asyncio.wait({last_word}, timeout=left)
        if not last_word.done():
            last_word.cancel()
            logger.error("the end of the attempt is not recorded: %s", rollout.rollout_id)

    async def _say(self, rollout: AttemptedRollout, task: asyncio.Task[Any], message: str) -> None:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen
        try:
            ending = Ending(FailureKind.INFRA_ERROR, message)
            await self._end(rollout, ending, {}, status="unresponsive")
        except Exception:
            logger.exception("the end of the attempt is not recorded: %s", rollout.rollout_id)


async def _wait(task: asyncio.Task[Any], event: StopEvent | None) -> None:
    """Wait for the task's end; cancel it when the event is set."""
    if event is not None:
        while not task.done() and not event.is_set():
            await asyncio.wait({task}, timeout=EVENT_POLL_SECONDS)
        task.cancel()
    await asyncio.wait({task})


def _failed(error: Exception) -> Ending:
    """Return the ending of an attempt that failed outside of its agent."""
    if isinstance(error, ConfigError):
        kind = FailureKind.AGENT_ERROR
    elif isinstance(error, StoreError | RuntimeError):
        kind = FailureKind.INFRA_ERROR
    else:
        kind = classify_exception(error)
    message = describe_exception(error)
    logger.warning("attempt failed outside of its agent: %s", message)
    return Ending(kind, message, traceback=format_traceback(error), error=error)
