"""Which tracer and which attempt the running code belongs to.

Both live in context variables: they follow `await`, new asyncio tasks, and threads that run in a
copied context. There is no active tracer per process, so many attempts run at once in one process.
"""

import os
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tracer's contract builds on this module
    from agl_core.tracer.base import Tracer


@dataclass(frozen=True, slots=True)
class CurrentAttempt:
    """The attempt that the running code belongs to."""

    tracer: "Tracer"
    rollout_id: str
    attempt_id: str
    process_id: int = field(default_factory=os.getpid)
    """Where it runs; a process that the agent forks has a copy of the tracer that leads nowhere."""


current_attempt: ContextVar[CurrentAttempt | None] = ContextVar("agl_current_attempt", default=None)
"""Set by a tracer while an attempt is open."""
_active_tracer: ContextVar["Tracer | None"] = ContextVar("agl_active_tracer", default=None)


def get_current_attempt() -> CurrentAttempt | None:
    """Return the attempt of the running code, or None outside of any."""
    return current_attempt.get()


def get_active_tracer() -> "Tracer | None":
    """Return the tracer that records what the running code emits, or None.

    It is the tracer of the current attempt, else what `set_active_tracer` set.
    """
    current = current_attempt.get()
    return current.tracer if current else _active_tracer.get()


def set_active_tracer(tracer: "Tracer") -> None:
    """Let a tracer record what the running code emits outside of any attempt.

    It holds in this context: this task or thread, and the tasks that it starts.

    Raises:
        ValueError: A tracer is active already.
    """
    if get_active_tracer() is not None:
        raise ValueError(
            "An active tracer is already set. Cannot set a new one: a tracer is "
            "active here already; call clear_active_tracer() first"
        )
    _active_tracer.set(tracer)


def clear_active_tracer() -> None:
    """Undo `set_active_tracer`; the tracer of a running attempt stays active until it ends."""
    _active_tracer.set(None)
