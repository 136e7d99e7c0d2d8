"""What ties a shard on a work pool to the run that it belongs to.

    shard -> run   a sign of life every few seconds; without one it is replaced
    run -> shard   the end of the start that claimed it (cancelled, failed, taken over), the order
                   to stop because it was given up, or no more signs of life: then it stops

It asks the ledger, not the server, and from a thread: also while agents keep the event loop busy.
A process whose agents do not stop ends hard, after a grace.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from agl_core.errors import LedgerError, RunCancelled
from agl_core.ledger.signs import SignsOfLife, read_sign
from agl_core.ledger.starts import RunStarts

logger = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
"""Between two looks whether the start is over; each is one request."""
ORPHAN_SECONDS = 180.0
"""Without a sign of life of the run: its process was killed, and nobody said that it is over."""
EXIT_GRACE_SECONDS = 10.0
"""From the order to stop to the end of the process."""


class ShardWatch:
    """Gives the signs of life of one shard and learns when it must stop."""

    def __init__(
        self,
        starts: RunStarts,
        start: int,
        shard: str,
        *,
        is_retry: bool = False,
        on_stop: Callable[[], object],
        end_process: Callable[[], object] = lambda: os._exit(1),
        orphan_seconds: float = ORPHAN_SECONDS,
    ) -> None:
        """Prepare to watch.

        Args:
            starts: Of the shard's run.
            start: Number of the one that the shard belongs to.
            shard: Its name within the run.
            is_retry: It was started again by itself, maybe after its start ended; then it has only
                newer starts to heed.
            on_stop: Called from a thread, once, when the shard must stop.
            end_process: Called if the process still runs `EXIT_GRACE_SECONDS` later.
            orphan_seconds: See `ORPHAN_SECONDS`.
        """
        self.reason = ""
        """Why the shard must stop; empty while it need not."""
        self._starts = starts
        self._start = start
        self._shard = shard
        self._on_stop = on_stop
        self._end_process = end_process
        self._orphan_seconds = orphan_seconds
        self._seen: object = None
        self._seen_at = time.monotonic()
        self._is_alone = is_retry and starts.has_ended(start)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shard-watch", daemon=True)
        alive = starts.shard_key(start, shard, "alive")
        self._signs = SignsOfLife(starts.storage, alive, starts.times.renew, self._look_closely)

    def start(self) -> None:
        """Give the first sign of life, and watch from threads from then on.

        Raises:
            RunCancelled: The shard began too late: its start is over, or it was given up.
        """
        if self._is_over() or self._is_given_up():
            raise RunCancelled(f"shard {self._shard} began when nobody waited for it any more")
        self._signs.start()
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopping.set()
        self._signs.stop()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                if self._is_over():
                    self._order_stop("the run's start that it belongs to is over")
                    return
            except LedgerError as error:
                logger.warning("shard=%s: cannot look whether it is over: %s", self._shard, error)

    def _is_over(self) -> bool:
        if self._is_alone:
            return self._starts.has_begun(self._start + 1)
        return self._starts.has_ended(self._start)

    def _is_given_up(self) -> bool:
        stop = self._starts.shard_key(self._start, self._shard, "stop")
        return self._starts.storage.exists(stop)

    def _look_closely(self) -> None:
        if self._is_given_up():
            self._order_stop("it was given up and replaced")
        if self._is_alone:
            return
        sign = read_sign(self._starts.storage, self._starts.alive_key(self._start))
        now = time.monotonic()
        if sign != self._seen:
            self._seen, self._seen_at = sign, now
        elif now - self._seen_at > self._orphan_seconds:
            self._order_stop(f"its run has given no sign of life for {self._orphan_seconds:.0f} s")

    def _order_stop(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        logger.warning("shard=%s stops: %s", self._shard, reason)
        threading.Thread(target=self._end_after_grace, name="shard-end", daemon=True).start()
        self._on_stop()

    def _end_after_grace(self) -> None:
        time.sleep(EXIT_GRACE_SECONDS)
        logger.error(
            "shard=%s still runs %.0f s after it was to stop; its process ends now",
            self._shard,
            EXIT_GRACE_SECONDS,
        )
        self._end_process()
