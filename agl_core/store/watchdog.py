"""A thread that looks for expired attempts, whether or not anybody calls the store.

It does not correct jumps of the system's clock: processes that share a file would each do it.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable

from agl_core.store.forking import fork_safe_lock

logger = logging.getLogger(__name__)


class Watchdog:
    """Calls a method of its owner again and again; ends with the owner.

    Args:
        look: Bound method to call; held weakly.
        seconds: Between two calls.
    """

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        self._look = weakref.WeakMethod(look)
        self._seconds = seconds
        self._lock = fork_safe_lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0

    def start(self) -> None:
        """Start the thread, unless it runs in this process."""
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid != os.getpid() and not self._stopped.is_set():
                self._thread = threading.Thread(
                    target=_watch,
                    args=(self._look, self._seconds, self._stopped),
                    name="agl-store-watchdog",
                    daemon=True,
                )
                self._thread.start()
                self._pid = os.getpid()

    def stop(self) -> None:
        """Stop the thread for good and wait for its end."""
        self._stopped.set()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()


def _watch(
    look: "weakref.WeakMethod[Callable[[], None]]", seconds: float, stopped: threading.Event
) -> None:
    while not stopped.wait(seconds):
        method = look()
        if method is None:
            return
        try:
            method()
        except Exception:
            logger.exception("the store could not look for expired attempts; it tries again")
        del method
