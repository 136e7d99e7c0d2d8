"""Signs of life in the ledger: small files that a living process replaces every few seconds.

Whoever waits for the process looks whether its file changes; no clocks are compared for that.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.storage import Storage

logger = logging.getLogger(__name__)


class SignOfLife(BaseModel):
    """The last sign of a living process; any change counts, whatever the clocks say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int
    at: float
    """UTC epoch seconds, by the host's clock."""
    host: str
    pid: int


class SignsOfLife:
    """Replaces a small file every few seconds, from a thread, so that others see who lives."""

    def __init__(
        self, storage: Storage, key: str, every_seconds: float, look: Callable[[], object]
    ) -> None:
        self._storage = storage
        self._key = key
        self._every_seconds = every_seconds
        self._look = look
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs-of-life", daemon=True)

    def start(self) -> None:
        """Give the first sign now, the others from a thread."""
        self._give(0)
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Give no more signs."""
        self._stopping.set()
        if wait and self._thread.is_alive():
            self._thread.join(timeout=self._every_seconds)

    def _run(self) -> None:
        count = 0
        while not self._stopping.wait(self._every_seconds):
            count += 1
            try:
                self._give(count)
                self._look()
            except LedgerError as error:
                logger.warning("could not give a sign of life, will try again: %s", error)

    def _give(self, count: int) -> None:
        sign = SignOfLife(count=count, at=time.time(), host=socket.gethostname(), pid=os.getpid())
        self._storage.replace(self._key, sign.model_dump_json().encode())


def read_sign(storage: Storage, key: str) -> SignOfLife | None:
    """Return a sign of life; None where none was given."""
    if not storage.exists(key):
        return None
    return files.read_model(storage, Unrecorded(key), SignOfLife)


def place() -> str:
    """Return what processes have in common whose ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_started(pid: int) -> str | None:
    """Return when a process of this host began, in its own units; None where none runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
