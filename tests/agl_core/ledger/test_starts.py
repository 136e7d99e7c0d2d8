"""One living start at a time, who holds it, and what a process that lost it may still write."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import ConfigError, LeaseLostError
from agl_core.ledger import files
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.signs import SignOfLife
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.start_record import LeaseTimes, StartRecord
from agl_core.ledger.starts import RunLease, RunStarts
from agl_core.ledger.storage import Storage, open_storage
from tests.builders import POLICY, make_requests

TIMES = LeaseTimes(renew=0.05, expire=60.0, watch=0.4)
LONG = 20.0
"""A watch whose end would be noticed, where what is claimed is that nobody watches."""


def open_starts(storage: Storage, watch: float = TIMES.watch) -> RunStarts:
    return RunStarts(storage, "runs/x/", "x", replace(TIMES, watch=watch))


def begin(starts: RunStarts, **overrides: Any) -> RunLease:
    values: dict[str, Any] = {"committed": 0, "max_automatic": 2}
    return starts.begin(**values | overrides)


def write_start(starts: RunStarts, *, sign_age: float, **changes: Any) -> StartRecord:
    """A start of a process on another host."""
    record = StartRecord(
        number=1,
        nonce="n",
        host="elsewhere",
        place="elsewhere/boot",
        pid=7,
        process_started="1",
        flow_run_id=None,
        flow_run_name="night",
        since=time.time() - 1000.0,
        automatic=False,
        committed=0,
    ).model_copy(update=changes)
    key = f"{starts.prefix}{record.number:06d}.start.json"
    files.put_json(starts.storage, key, record.model_dump(mode="json"))
    give_sign(starts, 1, sign_age)
    return record


def give_sign(starts: RunStarts, count: int, age: float) -> None:
    sign = SignOfLife(count=count, at=time.time() - age, host="elsewhere", pid=7)
    starts.storage.replace(starts.alive_key(1), sign.model_dump_json().encode())


def test_starts_are_numbered_and_each_is_recorded(storage: Storage):
    starts = open_starts(storage)
    for number in (1, 2):
        lease = begin(starts, flow_run_name=f"run-{number}")
        assert lease.number == number
        lease.end("done")
    assert [start.flow_run_name for start in starts.all()] == ["run-1", "run-2"]


def test_a_run_that_this_process_holds_is_refused_at_once_and_says_who(local_storage: Storage):
    starts = open_starts(local_storage, watch=LONG)
    lease = begin(starts, flow_run_name="mine")
    lease.keep(lambda: None)
    try:
        clock = time.monotonic()
        for refuse in (starts.refuse_if_held, lambda: begin(starts)):
            with pytest.raises(ConfigError) as refused:
                refuse()
            assert f"flow run mine, process {os.getpid()} on host" in str(refused.value)
            assert "since 2" in str(refused.value)
            assert "without another one it is over at 2" in str(refused.value)
        assert time.monotonic() - clock < LONG
    finally:
        lease.end("done")
    begin(starts).end("done")


def test_a_start_that_let_go_without_a_trace_holds_nothing(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
):
    """As on a full disk, which does not take the end's file."""
    starts = open_starts(local_storage)
    lease = begin(starts)
    with monkeypatch.context() as patch:
        patch.setattr(starts, "end", lambda number, reason: None)
        lease.end("failed")
    assert not starts.has_ended(1)
    begin(starts).end("done")
    assert starts.end_reason(1) == "superseded"


def test_a_holder_that_was_killed_on_this_host_is_dead_at_once(tmp_path: Path):
    code = (
        "import os, signal, sys\n"
        "from agl_core.ledger.starts import RunStarts\n"
        "from agl_core.ledger.storage import open_storage\n"
        "starts = RunStarts(open_storage(sys.argv[1]), 'runs/x/', 'x')\n"
        "starts.begin(committed=0, max_automatic=1).keep(lambda: None)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    starts = open_starts(open_storage(str(tmp_path)), watch=LONG)
    assert not starts.has_ended(1)
    clock = time.monotonic()
    lease = begin(starts)
    assert time.monotonic() - clock < LONG
    assert lease.number == 2
    assert starts.end_reason(1) == "superseded"
    assert lease.ended_before == "superseded"


def test_a_fresh_start_of_another_host_is_refused_at_once(storage: Storage):
    starts = open_starts(storage)
    write_start(starts, sign_age=5.0)
    with pytest.raises(ConfigError, match="flow run night, process 7 on host elsewhere, since"):
        begin(starts)


def test_a_start_of_another_host_without_signs_is_taken_over_after_a_while(storage: Storage):
    starts = open_starts(storage)
    write_start(starts, sign_age=100.0)
    clock = time.monotonic()
    assert begin(starts).number == 2
    assert time.monotonic() - clock >= TIMES.watch


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clocks_that_differ_by_an_hour_end_no_living_start(local_storage: Storage, skew: float):
    starts = open_starts(local_storage)
    write_start(starts, sign_age=skew)
    code = (
        "import sys, time\n"
        "from agl_core.ledger.signs import SignOfLife\n"
        "from agl_core.ledger.storage import open_storage\n"
        "for count in range(2, 100):\n"
        "    sign = SignOfLife(count=count, at=time.time() - float(sys.argv[3]), host='h', pid=7)\n"
        "    open_storage(sys.argv[1]).replace(sys.argv[2], sign.model_dump_json().encode())\n"
        "    time.sleep(0.05)\n"
    )
    arguments = [local_storage.uri, starts.alive_key(1), str(skew)]
    with subprocess.Popen([sys.executable, "-c", code, *arguments]) as holder:
        before = local_storage.read(starts.alive_key(1))
        while local_storage.read(starts.alive_key(1)) == before:
            time.sleep(0.02)
        with pytest.raises(ConfigError, match="is carried on by"):
            begin(starts)
        holder.kill()


def test_who_was_taken_over_commits_nothing_more(storage: Storage):
    lease = begin(open_starts(storage))
    iteration = IterationLedger(storage, "x", 0, lease)
    rollouts = RolloutSet(iteration, "train")
    rollouts.write_requests(make_requests(2), POLICY, {})
    rollouts.claim([0])
    open_starts(storage).end(1, "superseded")
    RunStarts(storage, "runs/x/", "x", TIMES).begin(committed=0, max_automatic=1)
    taken_over = pytest.raises(LeaseLostError, match=r"taken over by .*process \d+ on host")
    with taken_over, iteration.stage("propose") as stage:
        stage.put_json("late", {})
    with pytest.raises(LeaseLostError):
        rollouts.claim([1])
    assert iteration.record("propose") is None
    (late,) = storage.list(f"{iteration.prefix}propose/")
    assert late.endswith("/late.json"), "kept, unused"
    assert lease.is_lost


def test_the_loss_is_told_without_being_asked(local_storage: Storage):
    starts = open_starts(local_storage)
    lease, told = begin(starts), []
    lease.keep(lambda: told.append(True))
    starts.end(1, "superseded")
    deadline = time.monotonic() + 10
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lease.end("failed")
    assert starts.end_reason(1) == "superseded", "the first end stays"


def test_a_lease_that_is_let_go_while_it_is_looked_at_is_not_lost(local_storage: Storage):
    lease, told = begin(open_starts(local_storage)), []
    lease.keep(lambda: told.append(True))
    lease.end("done")
    lease._look()
    assert not told
    assert not lease.is_lost


def test_two_writers_of_one_number_are_told_apart_without_conditional_put(s3_uri: str):
    """As when both looked before either wrote: the later one's bytes stand."""
    starts = open_starts(open_storage(s3_uri, conditional_put=False))
    lease = begin(starts)
    lease.check()
    other = lease.record.model_copy(update={"nonce": "other", "host": "elsewhere"})
    starts.storage.replace(f"{starts.prefix}000001.start.json", other.model_dump_json().encode())
    with pytest.raises(LeaseLostError, match="on host elsewhere"):
        lease.check()


def test_automatic_starts_in_a_row_are_capped(local_storage: Storage):
    starts = open_starts(local_storage)
    for _ in range(2):
        begin(starts, automatic=True).end("failed")
    with pytest.raises(
        ConfigError, match=r"started 2 times in a row by automations .* iteration 0"
    ):
        begin(starts, automatic=True)
    begin(starts, automatic=True, committed=1).end("failed")  # it got further meanwhile
    begin(starts, committed=1).end("failed")  # someone looked after it
    for _ in range(2):
        begin(starts, automatic=True, committed=1).end("failed")
    with pytest.raises(ConfigError, match="max_automatic_starts is 2"):
        begin(starts, automatic=True, committed=1)
