"""Flags that threads or processes share: set once, they say that the work is over."""

import threading
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Protocol


class ExecutionEvent(Protocol):
    """What `threading.Event` promises."""

    def set(self) -> None:
        """Set the flag."""
        ...

    def clear(self) -> None:
        """Take it back."""
        ...

    def is_set(self) -> bool:
        """Tell whether it is set."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for so many seconds, and tell whether it is."""
        ...


class ThreadingEvent:
    """For threads of one process."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Set the flag."""
        self._event.set()

    def clear(self) -> None:
        """Take it back."""
        self._event.clear()

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for so many seconds, and tell whether it is."""
        return self._event.wait(timeout)


class MultiprocessingEvent:
    """For processes that are forked with it, or spawned and given it as an argument.

    Unlike that of `multiprocessing` it has no lock: a process that is killed while it looks at the
    flag would keep the others from ever looking again. The flag is a message in a pipe that nobody
    takes out.

    Args:
        ctx: Of the processes; None for the default one.
    """

    def __init__(self, ctx: BaseContext | None = None) -> None:
        self._reader, self._writer = (ctx or get_context()).Pipe(duplex=False)

    def set(self) -> None:
        """Set the flag."""
        if not self.is_set():
            self._writer.send_bytes(b"set")

    def clear(self) -> None:
        """Take it back; for one process only, while no other looks."""
        while self.is_set():
            self._reader.recv_bytes()

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self._reader.poll(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for so many seconds, and tell whether it is."""
        return self._reader.poll(timeout)

    def close(self) -> None:
        """Free the pipe in this process."""
        self._reader.close()
        self._writer.close()
