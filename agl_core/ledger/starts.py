"""Starts of a run: who carries it on, since when, and whether he still lives.

runs/<run_id>/starts/
    000001.start.json   who began; written once under the next number, so the number is the lease
    000001.alive.json   replaced every few seconds while he lives
    000001.end.json     written once: the start is over, by itself or because another took over
runs/<run_id>/signs/000001/
    <shard>.alive.json  the same of each shard on a work pool
    <shard>.stop.json   written once: the shard was given up

One start at a time: another one is refused while the last lives. It is dead at once where its
process is gone from this host; elsewhere when its sign of life is old by the clock and does not
change while it is watched, so clocks that differ end no living start. Who takes over first writes
the other's end, which that one looks for before it writes a record: a process that was paused for
long commits nothing.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from agl_core.errors import ConfigError, ConflictError, LeaseLostError, LedgerError
from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.signs import SignOfLife, SignsOfLife, place, process_started, read_sign
from agl_core.ledger.start_record import EndReason, LeaseTimes, StartEnd, StartRecord, clock
from agl_core.ledger.storage import Storage

logger = logging.getLogger(__name__)

_held_here: set[str] = set()
"""Nonces of the starts that this process holds."""


class RunStarts:
    """The starts of one run."""

    def __init__(
        self, storage: Storage, prefix: str, run_id: str, times: LeaseTimes | None = None
    ) -> None:
        self.storage = storage
        self.prefix = f"{prefix}starts/"
        self.signs_prefix = f"{prefix}signs/"
        self.run_id = run_id
        self.times = times or LeaseTimes()

    def all(self) -> list[StartRecord]:
        """Return all starts, oldest first."""
        keys = [key for key in self.storage.list(self.prefix) if key.endswith(".start.json")]
        return [files.read_model(self.storage, Unrecorded(key), StartRecord) for key in keys]

    def latest(self) -> StartRecord | None:
        """Return the last start."""
        keys = [key for key in self.storage.list(self.prefix) if key.endswith(".start.json")]
        return files.read_model(self.storage, Unrecorded(keys[-1]), StartRecord) if keys else None

    def has_ended(self, number: int) -> bool:
        """Say whether a start is over; one request."""
        return self.storage.exists(self._key(number, "end"))

    def end(self, number: int, reason: EndReason) -> None:
        """Say that a start is over; its first end stays."""
        end = StartEnd(reason=reason, at=time.time(), host=socket.gethostname())
        try:
            files.put_json(self.storage, self._key(number, "end"), end.model_dump(mode="json"))
        except ConflictError:
            logger.debug("run=%s start=%d has an end already", self.run_id, number)

    def has_begun(self, number: int) -> bool:
        """Say whether there is a start with this number; one request."""
        return self.storage.exists(self._key(number, "start"))

    def end_reason(self, number: int) -> EndReason | None:
        """Return how a start ended; None where it has not."""
        if not self.has_ended(number):
            return None
        end = files.read_model(self.storage, Unrecorded(self._key(number, "end")), StartEnd)
        return end.reason

    def end_key(self, number: int) -> str:
        """Return the key of a start's end."""
        return self._key(number, "end")

    def keys_until(self, number: int) -> list[str]:
        """Return the keys of the starts up to one that holds the run: their records, and the ends
        of those before it.
        """
        begun = range(1, number + 1)
        return [self._key(n, "start") for n in begun] + [self._key(n, "end") for n in begun[:-1]]

    def alive_key(self, number: int) -> str:
        """Return the key of a start's sign of life."""
        return self._key(number, "alive")

    def shard_key(self, number: int, shard: str, what: Literal["alive", "stop"]) -> str:
        """Return the key of a shard's sign of life, or of the order that it shall stop."""
        return f"{self.signs_prefix}{number:06d}/{shard}.{what}.json"

    def give_up(self, number: int, shard: str, reason: str) -> None:
        """Have a shard stop that was given up, should it still run."""
        values = {"reason": reason, "at": time.time()}
        try:
            files.put_json(self.storage, self.shard_key(number, shard, "stop"), values)
        except ConflictError:
            logger.debug("shard=%s was given up before", shard)

    def refuse_if_held(self) -> None:
        """Do nothing where nobody carries the run on, or where that must be watched first.

        Raises:
            ConfigError: A living process does; the message says who, since when and how long.
        """
        latest = self.latest()
        if latest is not None and not self.has_ended(latest.number) and not self._is_dead(latest):
            self._refuse_if_fresh(latest)

    def begin(
        self,
        *,
        committed: int,
        max_automatic: int,
        automatic: bool = False,
        flow_run_id: str | None = None,
        flow_run_name: str | None = None,
        code: dict[str, Any] | None = None,
        packages: dict[str, str] | None = None,
    ) -> "RunLease":
        """Take the run over from a start that is over, and hold it.

        Waits `times.watch` seconds where only time can tell that the last start is over.

        Args:
            committed: Iterations that are committed.
            max_automatic: Starts by automations in a row, with as many committed.
            automatic: Whether this is one.
            flow_run_id: Of the flow run that holds it.
            flow_run_name: Its name, for messages.
            code: Of this process, for the record.
            packages: The same.

        Raises:
            ConfigError: A living process carries the run on, or automations started it too often.
        """
        starts = self.all()
        if automatic:
            self._check_cap(starts, committed, max_automatic)
        latest = starts[-1] if starts else None
        if latest is not None and not self.has_ended(latest.number):
            self._wait_for_end(latest)
            self.end(latest.number, "superseded")
        pid = os.getpid()
        record = StartRecord(
            number=latest.number + 1 if latest else 1,
            nonce=uuid.uuid4().hex,
            host=socket.gethostname(),
            place=place(),
            pid=pid,
            process_started=process_started(pid),
            flow_run_id=flow_run_id,
            flow_run_name=flow_run_name,
            since=time.time(),
            automatic=automatic,
            committed=committed,
            code=code,
            packages=packages,
        )
        try:
            files.put_json(
                self.storage, self._key(record.number, "start"), record.model_dump(mode="json")
            )
        except ConflictError as error:
            other = self.latest()
            assert other is not None
            raise ConfigError(
                f"run {self.run_id!r} was started elsewhere at this moment: {other.holder}"
            ) from error
        return RunLease(self, record, self.end_reason(latest.number) if latest else None)

    def read(self, number: int) -> StartRecord:
        """Return one start."""
        return files.read_model(self.storage, Unrecorded(self._key(number, "start")), StartRecord)

    def _check_cap(self, starts: list[StartRecord], committed: int, limit: int) -> None:
        count = 0
        for start in reversed(starts):
            if not start.automatic or start.committed != committed:
                break
            count += 1
        if count >= limit:
            raise ConfigError(
                f"run {self.run_id!r} was started {count} times in a row by automations and never "
                f"got beyond iteration {committed} (max_automatic_starts is {limit}): see why its "
                "last flow run ended, then start it by hand"
            )

    def _wait_for_end(self, start: StartRecord) -> None:
        """Return once a start that has no end is known to be over.

        Raises:
            ConfigError: It lives.
        """
        if self._is_dead(start):
            return
        self._refuse_if_fresh(start)
        before = self._sign(start.number)
        logger.warning(
            "run %s: no recent sign of life of start %d (%s); watching for %.0f s whether it is "
            "over",
            self.run_id,
            start.number,
            start.holder,
            self.times.watch,
        )
        deadline = time.monotonic() + self.times.watch
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, self.times.renew / 4))
            if self.has_ended(start.number):
                return
            if (sign := self._sign(start.number)) != before:
                raise self._held(start, sign)

    def _is_dead(self, start: StartRecord) -> bool:
        """Say whether its process, of this host, is gone, or is this one and let the run go (a full
        disk may have kept that from the ledger); of another host that is not known.
        """
        if start.place != place() or start.process_started is None:
            return False
        if process_started(start.pid) != start.process_started:
            return True
        return start.pid == os.getpid() and start.nonce not in _held_here

    def _refuse_if_fresh(self, start: StartRecord) -> None:
        sign = self._sign(start.number)
        age = time.time() - (sign.at if sign else start.since)
        if abs(age) < self.times.expire:
            raise self._held(start, sign)

    def _held(self, start: StartRecord, sign: SignOfLife | None) -> ConfigError:
        seen = sign.at if sign else start.since
        return ConfigError(
            f"run {self.run_id!r} is carried on by {start.holder}; its last sign of life is of "
            f"{clock(seen)}, and without another one it is over at "
            f"{clock(seen + self.times.expire)}. Stop it, or wait for its end"
        )

    def _sign(self, number: int) -> SignOfLife | None:
        return read_sign(self.storage, self.alive_key(number))

    def _key(self, number: int, what: str) -> str:
        return f"{self.prefix}{number:06d}.{what}.json"


class RunLease:
    """The right to carry a run on, held by this process until `end`."""

    def __init__(
        self, starts: RunStarts, record: StartRecord, ended_before: EndReason | None = None
    ) -> None:
        self._starts = starts
        self.record = record
        _held_here.add(record.nonce)
        self.ended_before = ended_before
        """How the start before this one ended; None for the first one."""
        self.number = record.number
        self._ended = False
        self._signs = SignsOfLife(
            starts.storage, starts.alive_key(record.number), starts.times.renew, self._look
        )
        self._on_lost: Callable[[], object] = lambda: None
        self.is_lost = False
        """Whether another process took over; found out by itself within one renewal."""

    def keep(self, on_lost: Callable[[], object]) -> None:
        """Renew from a thread until the end; call `on_lost` from there if another took over."""
        self._on_lost = on_lost
        self._signs.start()

    def check(self) -> None:
        """Do nothing while this process holds the run.

        Raises:
            LeaseLostError: Another start took over; what this process did since is kept, unused.
        """
        if self._ended:
            raise LeaseLostError(
                f"run {self._starts.run_id!r}: start {self.number} is over; it records nothing more"
            )
        is_over = self._starts.has_ended(self.number)
        if not is_over and not self._starts.storage.conditional_put:
            # Two writers of one key at the same moment both believe it theirs.
            is_over = self._starts.read(self.number).nonce != self.record.nonce
        if is_over:
            self.is_lost = True
            other = self._starts.latest()
            by = f" by {other.holder}" if other and other.nonce != self.record.nonce else ""
            raise LeaseLostError(
                f"run {self._starts.run_id!r} was taken over{by}, because process "
                f"{self.record.pid} on {self.record.host} gave no sign of life for long; it stops "
                "here and records nothing more"
            )

    def end(self, reason: EndReason) -> None:
        """Let the run go; shards that still run for this start stop. The first reason stays."""
        if self._ended:
            return
        self._ended = True
        _held_here.discard(self.record.nonce)
        self._signs.stop()
        if self.is_lost:
            return
        try:
            self._starts.end(self.number, reason)
        except LedgerError as error:  # whatever ended the run says more
            logger.warning("run=%s could not record its end: %s", self._starts.run_id, error)

    def _look(self) -> None:
        try:
            self.check()
        except LeaseLostError:
            self._signs.stop(wait=False)
            if self.is_lost:  # else it was let go at this moment, by this process
                self._on_lost()
