"""The hooks around one attempt: called in their order, their errors logged and swallowed.

Their `sys.exit` and a CancelledError of their own too: a hook does not decide about an attempt.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agl_core.litagent.litagent import LitAgent
from agl_core.tracer.base import Tracer
from agl_core.types.core import AttemptedRollout, Hook
from agl_core.types.tracer import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HookCalls:
    """Calls every hook with what the attempt consists of."""

    hooks: Sequence[Hook]
    agent: LitAgent[Any]
    runner: Any
    tracer: Tracer
    rollout: AttemptedRollout

    async def rollout_start(self) -> None:
        """Call `on_rollout_start`."""
        await self._call("on_rollout_start")

    async def trace_start(self) -> None:
        """Call `on_trace_start`."""
        await self._call("on_trace_start", tracer=self.tracer)

    async def trace_end(self) -> None:
        """Call `on_trace_end`."""
        await self._call("on_trace_end", tracer=self.tracer)

    async def rollout_end(self, spans: Sequence[Span]) -> None:
        """Call `on_rollout_end`."""
        await self._call("on_rollout_end", spans=spans)

    async def _call(self, name: str, **what: Any) -> None:
        for hook in self.hooks:
            try:
                await getattr(hook, name)(
                    agent=self.agent, runner=self.runner, rollout=self.rollout, **what
                )
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                    raise
                logger.exception(
                    "hook failed: %s.%s rollout=%s",
                    type(hook).__name__,
                    name,
                    self.rollout.rollout_id,
                )


def _is_cancelled() -> bool:
    """Tell whether someone cancels this task: else a CancelledError is the hook's own."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class AgentHooks(Hook):
    """The deprecated methods `on_rollout_start` and `on_rollout_end` of an agent, as a hook."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Call the agent's."""
        agent.on_rollout_start(rollout, runner, runner.tracer)

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        """Call the agent's."""
        agent.on_rollout_end(rollout, rollout, runner, runner.tracer)


def overrides_hooks(agent: LitAgent[Any]) -> bool:
    """Tell whether an agent has one of the deprecated methods."""
    return any(
        getattr(type(agent), name) is not getattr(LitAgent, name)
        for name in ("on_rollout_start", "on_rollout_end")
    )
