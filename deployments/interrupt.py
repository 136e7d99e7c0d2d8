"""SIGINT and SIGTERM end a run alike, and soon.

An orderly end (rollouts cancelled, states told to the Prefect server, children stopped) took 80 s
on a busy machine with two cores (November 2026). A run may die at any time, so what is not done
after a few seconds is left: servers and engines end when this process does (`agl_core.lifeline`).
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from agl_core.runner.children import kill_all

INTERRUPTED = 130
"""Exit status of an interrupted run, by the shell's convention for SIGINT."""
_GRACE_SECONDS = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ends_promptly(say: Callable[[], None]) -> Generator[None]:
    """Take SIGTERM for Ctrl-C, and end the process with either, at once if the block goes on long.

    That a signal came is learned from the wakeup descriptor: during a flow run Prefect has its own
    handler for SIGTERM, which raises `TerminationSignal`.

    Args:
        say: Tells the user, before the process is ended at once.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.signal(signal.SIGTERM, _interrupt)
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_end_after_grace, args=(reader, say), daemon=True)
    watch.start()
    try:
        yield
    except KeyboardInterrupt:
        # Servers and engines are stopped. Prefect's exit handlers would wait more than a minute
        # for the server; typer turns this exception into an exit that runs them.
        say()
        kill_all()
        os._exit(INTERRUPTED)
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, before)
        writer.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_after_grace(reader: socket.socket, say: Callable[[], None]) -> None:
    """Wait for a signal, then end the process after the grace; return if the block ends first."""
    with reader:
        while number := reader.recv(1):
            if number[0] not in _SIGNALS:
                continue
            logging.disable()  # what is left behind from now on is left on purpose
            deadline = time.monotonic() + _GRACE_SECONDS
            while (left := deadline - time.monotonic()) > 0:
                reader.settimeout(left)
                try:
                    if not reader.recv(1):
                        return
                except TimeoutError:
                    break
            say()
            kill_all()
            os._exit(INTERRUPTED)
