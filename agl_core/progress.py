"""What a run is doing right now, for whoever shows it; nothing is decided from it.

A listener is set for the current context with `listen`; without one, reports go nowhere.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from agl_core.ledger.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage of an iteration begins."""

    iteration: int
    stage: str


@dataclass(frozen=True, slots=True)
class RolloutsFinished:
    """Some more rollouts of a set have ended."""

    rollout_set: str
    done: int
    expected: int


@dataclass(frozen=True, slots=True)
class IterationCommitted:
    """An iteration's manifest was written, or found on resume."""

    manifest: Manifest
    failure: str = ""
    """Kind and message of the failure that its training rollouts had most often, and how often;
    empty where none failed, and on resume."""


Event = StageStarted | RolloutsFinished | IterationCommitted


class Listener(Protocol):
    """Anything that takes events; called from the thread that reports."""

    def __call__(self, event: Event, /) -> None:
        """Take one event."""
        ...


_listener: ContextVar[Listener | None] = ContextVar("agl_progress_listener", default=None)


@contextmanager
def listen(listener: Listener) -> Generator[None]:
    """Send the reports of the enclosed code to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(event: Event) -> None:
    """Tell the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(event)
