"""SIGTERM ends a strategy as Ctrl-C does: in order, and with an exit status that tells it."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


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
