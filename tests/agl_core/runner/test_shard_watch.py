"""A shard on a pool stops when nobody waits for it any more."""

import time
from collections.abc import Callable

import pytest

from agl_core.errors import RunCancelled
from agl_core.ledger.signs import read_sign
from agl_core.ledger.starts import LeaseTimes, RunLease, RunStarts
from agl_core.ledger.storage import Storage
from agl_core.runner import shard_watch
from agl_core.runner.shard_watch import ShardWatch

SHARD = "000000-train-0001"


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(shard_watch, "EXIT_GRACE_SECONDS", 0.2)


@pytest.fixture
def starts(local_storage: Storage) -> RunStarts:
    return RunStarts(local_storage, "runs/x/", "x", LeaseTimes(0.05, 60.0, 0.3))


@pytest.fixture
def lease(starts: RunStarts) -> RunLease:
    return starts.begin(committed=0, max_automatic=1)


class Stops:
    """Counts what a watch did."""

    def __init__(self) -> None:
        self.stopped = 0
        self.ended = 0

    def stop(self) -> None:
        self.stopped += 1

    def end(self) -> None:
        self.ended += 1


def watch_shard(starts: RunStarts, stops: Stops, **values) -> ShardWatch:
    watch = ShardWatch(starts, 1, SHARD, on_stop=stops.stop, end_process=stops.end, **values)
    watch.start()
    return watch


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_its_sign_of_life_changes(starts: RunStarts, lease: RunLease):
    watch = watch_shard(starts, Stops())
    key = starts.shard_key(1, SHARD, "alive")
    first = read_sign(starts.storage, key)
    wait_until(lambda: read_sign(starts.storage, key) != first)
    watch.stop()


@pytest.mark.parametrize("reason", ["cancelled", "failed", "superseded"])
def test_it_stops_when_the_start_of_its_run_is_over(starts, lease: RunLease, reason):
    stops = Stops()
    watch = watch_shard(starts, stops)
    time.sleep(0.2)
    assert not watch.reason
    starts.end(1, reason)
    wait_until(lambda: stops.stopped)
    assert "start that it belongs to is over" in watch.reason
    wait_until(lambda: stops.ended)
    watch.stop()
    assert stops.stopped == 1


def test_it_stops_when_it_was_replaced(starts: RunStarts, lease: RunLease):
    stops = Stops()
    watch = watch_shard(starts, stops)
    starts.give_up(1, SHARD, "no sign of life")
    wait_until(lambda: stops.stopped)
    assert watch.reason == "it was given up and replaced"
    watch.stop()


def test_it_stops_when_its_run_was_killed(starts: RunStarts, lease: RunLease):
    stops = Stops()
    watch = watch_shard(starts, stops, orphan_seconds=0.3)
    wait_until(lambda: stops.stopped)
    assert "no sign of life" in watch.reason
    watch.stop()


def test_it_goes_on_while_its_run_lives(starts: RunStarts, lease: RunLease):
    lease.keep(lambda: None)
    stops = Stops()
    watch = watch_shard(starts, stops, orphan_seconds=0.5)
    time.sleep(1.5)
    assert not stops.stopped
    watch.stop()
    lease.end("done")


def test_one_that_begins_too_late_runs_nothing(starts: RunStarts, lease: RunLease):
    lease.end("cancelled")
    with pytest.raises(RunCancelled, match="nobody waited for it"):
        watch_shard(starts, Stops())


def test_one_that_is_retried_after_its_start_heeds_newer_ones(starts, lease: RunLease):
    lease.end("failed")
    stops = Stops()
    watch = watch_shard(starts, stops, is_retry=True, orphan_seconds=0.3)
    time.sleep(0.6)
    assert not stops.stopped
    starts.begin(committed=0, max_automatic=1)
    wait_until(lambda: stops.stopped)
    watch.stop()
