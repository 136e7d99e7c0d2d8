"""A process that is killed at any moment loses nothing that it was told is kept."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agl_core.store import SqliteLightningStore
from tests.agl_core.store.builders import begin, take
from tests.agl_core.store.conftest import Clock

WRITER = """
import asyncio, sys
from agl_core.store import SqliteLightningStore
from tests.agl_core.store.builders import make_span

async def main():
    store = SqliteLightningStore(sys.argv[1])
    def say(*words):
        print(*words, flush=True)
    while True:
        rollout = await store.enqueue_rollout({"text": "x" * 2000})
        say("queued", rollout.rollout_id)
        taken = await store.dequeue_rollout("w")
        say("taken", taken.rollout_id, taken.attempt.attempt_id)
        spans = [make_span(taken, n, attributes={"ids": list(range(500))}) for n in range(1, 6)]
        await store.add_many_spans(spans)
        say("spans", taken.rollout_id, *(span.span_id for span in spans))
        await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="succeeded")
        say("ended", taken.rollout_id)

asyncio.run(main())
"""


def write_until_killed(path: Path, seconds: float) -> list[list[str]]:
    """Return what a writer was told is kept before it was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        bufsize=0,  # else the first line would take the following ones with it
        cwd=Path.cwd(),
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=30)
    # A word that was cut off was not said.
    said = (first + rest).decode().rsplit("\n", 1)[0].splitlines()
    return [line.split() for line in said]


async def check(path: Path, said: list[list[str]]) -> None:
    store = SqliteLightningStore(path)
    kept = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
    for kind, rollout_id, *rest in said:
        assert rollout_id in kept
        if kind == "taken":
            attempts = await store.query_attempts(rollout_id)
            assert rest[0] in [attempt.attempt_id for attempt in attempts]
        elif kind == "spans":
            spans = await store.query_spans(rollout_id)
            assert [span.span_id for span in spans] == rest
            assert spans[0].attributes == {"ids": list(range(500))}
        elif kind == "ended":
            assert kept[rollout_id].status == "succeeded"
    await store.close()


def test_nothing_acknowledged_is_lost(tmp_path: Path):
    path = tmp_path / "store.db"
    chance = random.Random(7)
    said: list[list[str]] = []
    for _ in range(6):
        said += write_until_killed(path, chance.uniform(0.0, 0.25))
        asyncio.run(check(path, said))
    assert len(said) > 50


@pytest.mark.parametrize("retried", [True, False])
async def test_a_store_opened_again_goes_on(tmp_path: Path, retried: bool):
    path = tmp_path / "store.db"
    clock = Clock()
    store = SqliteLightningStore(path, clock=clock)
    config = {"max_attempts": 2, "retry_condition": ["unresponsive"]} if retried else {}
    running = await begin(store, **config)
    await store.enqueue_rollout("second", idempotency_key="k")
    run_id = (await store.statistics()).get("run_id")
    await store.close()

    again = SqliteLightningStore(path, clock=clock, scan_debounce_seconds=0)
    assert (await again.statistics()).get("run_id") == run_id
    await again.enqueue_rollout("second", idempotency_key="k")
    assert (await take(again)).input == "second"
    assert await again.dequeue_rollout() is None
    clock.sleep(61)
    if retried:
        retaken = await take(again)
        assert (retaken.rollout_id, retaken.attempt.sequence_id) == (running.rollout_id, 2)
    else:
        (ended,) = await again.wait_for_rollouts(rollout_ids=[running.rollout_id])
        assert ended.status == "failed"
    await again.close()
