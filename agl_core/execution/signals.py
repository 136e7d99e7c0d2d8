"""Signals that end a strategy: in order, with an exit status that tells it, and without a process
that nobody knows of.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Generator[None]:
    """Let Ctrl-C wait until the block has run, as while a process is started and noted down: one
    that is interrupted between the two would be left behind, and Python swallows what is raised
    while it forks.

    It does nothing where Python handles no Ctrl-C: in threads other than the main one, and where
    the handler was set by other code than Python's.

    Raises:
        KeyboardInterrupt: At the end of the block; or what else the handler does.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came = False

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal came
        del number, frame
        came = True

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def sigterm_interrupts() -> Generator[None]:
    """Take SIGTERM for Ctrl-C while the block runs, unless somebody handles it already.

    Raises:
        SystemExit: With 143, in place of the KeyboardInterrupt that a SIGTERM caused.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        del number, frame
        came = True
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if came:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
