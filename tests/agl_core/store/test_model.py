"""The store against a model of a page: whatever is called in whatever order, both agree on every
status, on who must stop, and on the order of the queue.
"""

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agl_core.store import CollectionBasedLightningStore, InMemoryLightningStore
from agl_core.store.sqlite import SqliteLightningStore
from agl_core.types.core import AttemptedRollout, RolloutConfig
from tests.agl_core.store.builders import make_span
from tests.agl_core.store.conftest import Clock

LIVE = ("preparing", "running")
ENDED = ("succeeded", "failed", "cancelled")
SILENCE, LIMIT = 20.0, 25.0


@dataclass
class ModelAttempt:
    record: AttemptedRollout
    limit: float
    """Time at which it times out."""
    seen: float
    silence: float = SILENCE
    status: str = "preparing"

    @property
    def deadline(self) -> float:
        return min(self.limit, self.seen + self.silence)


@dataclass
class ModelRollout:
    rollout_id: str
    config: RolloutConfig
    status: str = "queuing"
    attempts: list[ModelAttempt] = field(default_factory=list[ModelAttempt])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.loop = asyncio.new_event_loop()
        self.store = self.open()
        self.rollouts: list[ModelRollout] = []
        self.queue: list[ModelRollout] = []
        self.keys = 0

    def open(self) -> CollectionBasedLightningStore:
        return InMemoryLightningStore(clock=self.clock, scan_debounce_seconds=0)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        order = [rollout.rollout_id for rollout in self.queue]
        taken = self.run(self.store.dequeue_many_rollouts(limit=1000))
        assert [rollout.rollout_id for rollout in taken] == order
        self.run(self.store.close())
        self.loop.close()

    # The model.

    def set_rollout(self, rollout: ModelRollout, status: str) -> None:
        if rollout.status == status:
            return
        waits = status in ("queuing", "requeuing")
        if rollout in self.queue and not waits:
            self.queue.remove(rollout)
        elif rollout not in self.queue and waits:
            self.queue.append(rollout)
        rollout.status = status

    def set_attempt(self, rollout: ModelRollout, attempt: ModelAttempt, status: str) -> None:
        """Apply a status that the attempt may have."""
        if status == attempt.status:
            return
        attempt.status = status
        attempt.seen = self.clock.now if status in LIVE else attempt.seen
        if attempt is not rollout.attempts[-1]:
            return
        config = rollout.config
        if status in (*LIVE, "succeeded"):
            self.set_rollout(rollout, status)
        elif status in config.retry_condition and len(rollout.attempts) < config.max_attempts:
            self.set_rollout(rollout, "requeuing")
        else:
            self.set_rollout(rollout, "cancelled" if status == "cancelled" else "failed")

    def revivable(self, rollout: ModelRollout, attempt: ModelAttempt) -> bool:
        return (
            attempt.status == "unresponsive"
            and rollout.status == "requeuing"
            and attempt is rollout.attempts[-1]
        )

    def begin(self, rollout: ModelRollout, record: AttemptedRollout, silence: float) -> None:
        now = self.clock.now
        limit = now + (rollout.config.timeout_seconds or 3600)
        rollout.attempts.append(ModelAttempt(record, limit, now, silence))
        assert record.attempt.sequence_id == len(rollout.attempts)
        self.set_rollout(rollout, "preparing")

    def pick(self, data: st.DataObject) -> tuple[ModelRollout, ModelAttempt]:
        begun = [rollout for rollout in self.rollouts if rollout.attempts]
        rollout = data.draw(st.sampled_from(begun), "rollout")
        return rollout, data.draw(st.sampled_from(rollout.attempts), "attempt")

    def any_attempts(self) -> bool:
        return any(rollout.attempts for rollout in self.rollouts)

    # The calls.

    @rule(
        retried=st.sets(st.sampled_from(["failed", "timeout", "unresponsive", "cancelled"])),
        max_attempts=st.integers(1, 3),
        queued=st.booleans(),
        timeout=st.sampled_from([None, LIMIT]),
        repeated=st.booleans(),
    )
    def make(
        self,
        retried: set[Any],
        max_attempts: int,
        queued: bool,
        timeout: float | None,
        repeated: bool,
    ) -> None:
        config = RolloutConfig(
            retry_condition=sorted(retried), max_attempts=max_attempts, timeout_seconds=timeout
        )
        self.keys += 1
        call = self.store.enqueue_rollout if queued else self.store.start_rollout
        key = f"make-{self.keys}"
        record = self.run(call("task", config=config, idempotency_key=key))
        if repeated:
            again = self.run(call("task", config=config, idempotency_key=key))
            assert again == record
        rollout = ModelRollout(record.rollout_id, config)
        self.rollouts.append(rollout)
        if queued:
            self.queue.append(rollout)
        else:
            self.begin(rollout, record, silence=float("inf"))

    @rule(limit=st.integers(1, 2), lost=st.booleans())
    def dequeue(self, limit: int, lost: bool) -> None:
        self.keys += 1
        answers = [
            self.run(
                self.store.dequeue_many_rollouts(
                    limit=limit,
                    worker_id="w",
                    lease_seconds=SILENCE,
                    idempotency_key=f"take-{self.keys}",
                )
            )
            for _ in range(2 if lost and self.queue else 1)
        ]
        expected = self.queue[:limit]
        for answer in answers:
            assert [r.rollout_id for r in answer] == [r.rollout_id for r in expected]
        first, last = answers[0], answers[-1]
        assert [r.attempt.attempt_id for r in first] == [r.attempt.attempt_id for r in last]
        for rollout, record in zip(expected, first, strict=True):
            self.begin(rollout, record, SILENCE)

    @precondition(any_attempts)
    @rule(
        data=st.data(),
        status=st.sampled_from(
            ["running", "succeeded", "failed", "unresponsive", "timeout", "cancelled"]
        ),
    )
    def report(self, data: st.DataObject, status: Any) -> None:
        rollout, attempt = self.pick(data)
        ids = (rollout.rollout_id, attempt.record.attempt.attempt_id)
        self.run(self.store.update_attempt(*ids, status=status))
        revives = self.revivable(rollout, attempt) and status != "timeout"
        if attempt.status in LIVE or revives:
            self.set_attempt(rollout, attempt, status)
        if attempt.status in LIVE:
            attempt.seen = self.clock.now

    @precondition(any_attempts)
    @rule(data=st.data())
    def span(self, data: st.DataObject) -> None:
        rollout, attempt = self.pick(data)
        assert self.run(self.store.add_span(make_span(attempt.record))) is not None
        if attempt.status in LIVE or self.revivable(rollout, attempt):
            self.set_attempt(rollout, attempt, "running")
            attempt.seen = self.clock.now

    @precondition(any_attempts)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        rollout, attempt = self.pick(data)
        pair = (rollout.rollout_id, attempt.record.attempt.attempt_id)
        stop = self.run(self.store.renew_leases("w", [pair]))
        if self.revivable(rollout, attempt):
            self.set_attempt(rollout, attempt, "running")
        goes_on = attempt.status in LIVE and attempt is rollout.attempts[-1]
        assert stop == ([] if goes_on else [pair[1]])
        if goes_on:
            attempt.seen = self.clock.now

    @precondition(any_attempts)
    @rule(data=st.data())
    def begin_another(self, data: st.DataObject) -> None:
        rollout, _ = self.pick(data)
        call = self.store.start_attempt(rollout.rollout_id)
        if rollout.status in ENDED:
            with pytest.raises(ValueError, match="cannot go"):
                self.run(call)
        else:
            self.begin(rollout, self.run(call), silence=float("inf"))

    @precondition(lambda self: self.rollouts)
    @rule(data=st.data(), status=st.sampled_from([*ENDED, "requeuing"]))
    def decide(self, data: st.DataObject, status: Any) -> None:
        rollout = data.draw(st.sampled_from(self.rollouts))
        call = self.store.update_rollout(rollout.rollout_id, status=status)
        if rollout.status in ENDED and rollout.status != status:
            with pytest.raises(ValueError, match="cannot go"):
                self.run(call)
            return
        self.run(call)
        self.set_rollout(rollout, status)
        for attempt in rollout.attempts:
            if attempt.status in LIVE:
                attempt.status = "cancelled" if status == "requeuing" else status

    @rule(seconds=st.sampled_from([1.0, 15.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        live = [
            (attempt, rollout)
            for rollout in self.rollouts
            for attempt in rollout.attempts
            if attempt.status in LIVE and attempt.deadline <= self.clock.now
        ]
        for attempt, rollout in sorted(live, key=lambda pair: pair[0].deadline):
            silent = attempt.limit > self.clock.now
            self.set_attempt(rollout, attempt, "unresponsive" if silent else "timeout")

    @invariant()
    def both_agree(self) -> None:
        kept = self.run(self.store.query_rollouts())
        assert [(r.rollout_id, r.status) for r in kept] == [
            (r.rollout_id, r.status) for r in self.rollouts
        ]
        for record, rollout in zip(kept, self.rollouts, strict=True):
            assert (record.end_time is not None) == (record.status in ENDED)
            attempts = self.run(self.store.query_attempts(rollout.rollout_id))
            assert [a.status for a in attempts] == [a.status for a in rollout.attempts]
            for attempt in attempts:
                assert (attempt.end_time is None) == (attempt.status in LIVE)


class DiskMachine(Machine):
    def open(self) -> CollectionBasedLightningStore:
        self.folder = tempfile.TemporaryDirectory()
        return self.reopened()

    def reopened(self) -> CollectionBasedLightningStore:
        path = Path(self.folder.name) / "store.db"
        return SqliteLightningStore(path, clock=self.clock, scan_debounce_seconds=0)

    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.store = self.reopened()

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


BOUNDS = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestInMemory = Machine.TestCase
TestInMemory.settings = BOUNDS
TestOnDisk = DiskMachine.TestCase
TestOnDisk.settings = settings(BOUNDS, max_examples=15)
