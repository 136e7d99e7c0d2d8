"""Lets calls in, or not while weights are swapped; knows how many are inside."""

import threading

from agl_core.errors import TransientError


class Gate:
    """Counts the calls that are served; safe from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._retry_after_seconds: float | None = None

    @property
    def num_inside(self) -> int:
        """Calls that are served now, streams to their end."""
        return self._num_inside

    @property
    def retry_after_seconds(self) -> float | None:
        """When a refused call may come again; None while calls are let in."""
        return self._retry_after_seconds

    def enter(self) -> bool:
        """Count a call in; False, and not counted, while the gate is closed."""
        with self._changed:
            if self._retry_after_seconds is not None:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> None:
        """Count a call out."""
        with self._changed:
            self._num_inside -= 1
            if not self._num_inside:
                self._changed.notify_all()

    def close(self, retry_after_seconds: float = 1.0) -> None:
        """Let no more calls in."""
        with self._changed:
            self._retry_after_seconds = retry_after_seconds

    def open(self) -> None:
        """Let calls in again."""
        with self._changed:
            self._retry_after_seconds = None

    def wait_until_empty(self, deadline_seconds: float) -> None:
        """Return once every call that was let in has ended.

        Raises:
            TransientError: Some are still served at the deadline.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_inside, deadline_seconds):
                raise TransientError(
                    f"{self._num_inside} model calls did not end within {deadline_seconds:g} s"
                )
