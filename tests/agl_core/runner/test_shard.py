"""A shard's flushes: what ended is written, whatever the storage and the display do."""

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pytest

from agl_core.config import RolloutSettings
from agl_core.errors import ConfigError, LedgerError
from agl_core.ledger.rollout_set import Chunk, RolloutSet
from agl_core.ledger.run import RunLedger
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.storage import open_storage
from agl_core.litagent.decorator import as_agent
from agl_core.runner.shard import Shard, ShardRef, open_shard
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import LLM
from tests.agents import asks_once
from tests.agl_core.ledger.test_run import make_record
from tests.builders import POLICY, make_requests
from tests.fakes import ScriptedModelServer


class FaultySet(RolloutSet):
    """A set whose storage is slow, and refuses some writes first."""

    delay_seconds = 0.0
    num_refusals = 0

    def put_chunk(self, claim: int, number: int, spans: pa.Table, outcomes: pa.Table) -> Chunk:
        time.sleep(self.delay_seconds)
        if self.num_refusals:
            self.num_refusals -= 1
            raise LedgerError("no space left")
        return super().put_chunk(claim, number, spans, outcomes)


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(weights_digest=POLICY.weights_digest) as running:
        yield running


@pytest.fixture
def rollouts(tmp_path: Path) -> FaultySet:
    found = FaultySet(IterationLedger(open_storage(str(tmp_path)), "run", 0), "train")
    requests = make_requests(6).to_pylist()
    rows = [row | {"input": '{"question": "1+1?"}'} for row in requests]
    table = pa.Table.from_pylist(rows, schema=make_requests(0).schema)
    found.write_requests(table, POLICY, {"max_tokens": 4})
    found.claim(range(6))
    return found


def make_shard(
    rollouts: RolloutSet, server: ScriptedModelServer, agent: Any = asks_once, **settings: Any
) -> Shard:
    ref = ShardRef(
        ledger=rollouts.storage.uri,
        conditional_put=True,
        run_id="run",
        iteration=0,
        rollout_set="train",
        claim=1,
        model_servers=(server.base_url.removesuffix("/v1"),),
        settings=RolloutSettings(**{"flush_seconds": 0.05, "flush_rollouts": 2} | settings),
        start=1,
        concurrency=32,
    )
    return Shard(ref, rollouts, rollouts.read_requests().to_pylist(), as_agent(agent))


async def run_all(shard: Shard, on_flush: Any = None) -> list[tuple[int, int]]:
    """Run every rollout once; return what the display was told."""
    shown: list[tuple[int, int]] = []

    async def show(done: int, expected: int) -> None:
        shown.append((done, expected))

    async with shard.serving(), shard.flushing(on_flush or show):
        for index in shard.indices:
            await shard.run_attempt(index, attempt=1)
            shard.finish(index)
    return shown


async def test_everything_is_written_when_the_shard_ends(rollouts: FaultySet, server):
    shown = await run_all(make_shard(rollouts, server))
    assert rollouts.unfinished() == []
    assert shown[-1] == (6, 6)


async def test_a_process_that_reads_the_agent_now_refuses_one_that_changed_since_the_start(
    rollouts: FaultySet, server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = tmp_path / "changing_agent.py"
    module.write_text("def solve(task, llm):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ledger = RunLedger(rollouts.storage, "run")
    source = ledger.source(module.read_bytes())
    record = make_record(ledger, agent="changing_agent:solve")
    ledger.start(record.model_copy(update={"sources": {module.name: source.ref}}), [source])
    in_process = make_shard(rollouts, server).ref
    async with open_shard(in_process):
        module.write_text("def solve(task, llm):\n    return 0.0\n")
    async with open_shard(in_process):
        """It has the agent in memory, as it was when the run started."""
    reads_now = make_shard(rollouts, server, isolation="process").ref
    with pytest.raises(ConfigError, match=r"the agent's changing_agent\.py is not the one"):
        async with open_shard(reads_now):
            pass


async def test_top_p_and_top_k_of_the_resources_are_in_every_request(rollouts: FaultySet, server):
    sampling = {"temperature": 0.6, "top_p": 0.9, "extra_body": {"top_k": 5}}
    validation = RolloutSet(IterationLedger(rollouts.storage, "run", 0), "val")
    validation.write_requests(rollouts.read_requests(), POLICY, sampling)
    validation.claim(range(6))
    await run_all(make_shard(validation, server))
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in server.requests} == {
        (0.6, 0.9, 5)
    }


async def test_a_flush_under_way_is_waited_for(rollouts: FaultySet, server):
    rollouts.delay_seconds = 0.4
    await run_all(make_shard(rollouts, server))
    assert rollouts.unfinished() == []


async def test_what_could_not_be_written_is_written_with_the_next_flush(
    rollouts: FaultySet, server, caplog: pytest.LogCaptureFixture
):
    rollouts.num_refusals = 1
    await run_all(make_shard(rollouts, server))
    assert rollouts.unfinished() == []
    assert "could not flush, will try again: no space left" in caplog.text


async def test_a_shard_that_cannot_write_at_all_fails(rollouts: FaultySet, server):
    rollouts.num_refusals = 1000
    with pytest.raises(LedgerError, match="no space left"):
        await run_all(make_shard(rollouts, server))
    assert rollouts.unfinished() == list(range(6))


async def test_a_display_that_fails_costs_no_rollout(
    rollouts: FaultySet, server, caplog: pytest.LogCaptureFixture
):
    async def broken(done: int, expected: int) -> None:
        raise ConnectionError("the UI is gone")

    await run_all(make_shard(rollouts, server), broken)
    assert rollouts.unfinished() == []
    assert "could not show its progress: the UI is gone" in caplog.text


async def test_finished_rollouts_are_written_even_if_the_shard_breaks(rollouts: FaultySet, server):
    shard = make_shard(rollouts, server, flush_seconds=60.0, flush_rollouts=100)

    async def show(done: int, expected: int) -> None:
        del done, expected

    with pytest.raises(RuntimeError, match="broken"):
        async with shard.serving(), shard.flushing(show):
            await shard.run_attempt(0, attempt=1)
            shard.finish(0)
            raise RuntimeError("broken")
    assert rollouts.unfinished() == [1, 2, 3, 4, 5]


async def test_a_call_that_other_weights_served_fails_its_rollout_alone(
    rollouts: FaultySet, server: ScriptedModelServer
):
    """As when two runs share one model server."""
    shard = make_shard(rollouts, server)
    async with shard.serving():
        assert (await shard.run_attempt(0, attempt=1)).kind is FailureKind.SUCCEEDED
        server.weights_digest = "sha256:bb"
        outcome = await shard.run_attempt(1, attempt=1)
        server.fail_next(1, status=404)
        gone = await shard.run_attempt(2, attempt=1)
        server.weights_digest = POLICY.weights_digest
        assert (await shard.run_attempt(1, attempt=2)).kind is FailureKind.SUCCEEDED
    assert outcome.kind is gone.kind is FailureKind.INFRA_ERROR
    assert "for v000000 with weights sha256:aa, the model server serves v000000 with weights" in (
        outcome.message
    )
    assert "serves not that: does another run use the server?" in gone.message


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_agent_that_exits_fails_its_rollout_alone(
    rollouts: FaultySet, server: ScriptedModelServer, is_async: bool
):
    def exits(task: Any, llm: LLM) -> float:
        sys.exit(3)

    async def exits_in_the_loop(task: Any, llm: LLM) -> float:
        sys.exit(3)

    shard = make_shard(rollouts, server, agent=exits_in_the_loop if is_async else exits)
    async with shard.serving():
        outcome = await shard.run_attempt(0, attempt=1)
    assert outcome.kind is FailureKind.AGENT_ERROR
    assert outcome.message.startswith("RuntimeError: the agent raised SystemExit: 3 (tests/")
    assert "in exits" in outcome.traceback


async def test_tokens_beyond_the_policys_vocabulary_fail_their_rollout(
    rollouts: FaultySet, server, tmp_path: Path
):
    iteration = IterationLedger(open_storage(str(tmp_path)), "run", 0)
    small = FaultySet(iteration, "val-v000000")
    small.write_requests(rollouts.read_requests(), POLICY, {"max_tokens": 4}, vocabulary_size=50)
    small.claim(range(6))
    shard = make_shard(small, server)
    async with shard.serving():
        outcome = await shard.run_attempt(0, attempt=1)
    assert outcome.kind is FailureKind.NO_TRACE
    assert "no token of the policy, whose last one is 49" in outcome.message


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_cancelled_attempt_is_kept_and_its_rollout_unfinished(
    rollouts: FaultySet, server: ScriptedModelServer, is_async: bool
):
    """A sync agent cannot be stopped: its thread is left behind, the shard goes on at once."""
    begun, released = threading.Event(), threading.Event()

    def hangs(task: Any, llm: LLM) -> float:
        asks_once(task, llm)
        begun.set()
        released.wait(30)
        return 1.0

    async def hangs_in_the_loop(task: Any, llm: LLM) -> float:
        await asyncio.to_thread(asks_once, task, llm)
        begun.set()
        await asyncio.sleep(30)
        return 1.0

    shard = make_shard(rollouts, server, agent=hangs_in_the_loop if is_async else hangs)

    async def show(done: int, expected: int) -> None:
        del done, expected

    async def run_two() -> None:
        async with shard.serving(), shard.flushing(show), asyncio.TaskGroup() as group:
            for index in (0, 1):
                group.create_task(shard.run_attempt(index, attempt=1))

    running = asyncio.create_task(run_two())
    await asyncio.to_thread(begun.wait, 10)
    await asyncio.sleep(0.5)
    clock = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - clock < 5
    released.set()
    table = rollouts.outcomes()
    assert table["kind"].to_pylist() == ["cancelled"] * 2
    assert table["message"].to_pylist() == ["the attempt was cancelled"] * 2
    assert table["final"].to_pylist() == [False] * 2
    assert table["num_calls"].to_pylist() == [1] * 2, "what was recorded until then is kept"
    assert rollouts.unfinished() == list(range(6))


async def test_clients_that_an_agent_never_closes_leave_no_sockets(rollouts: FaultySet, server):
    """One client for each rollout, as README's agent; the garbage collector is off."""
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        await run_all(make_shard(rollouts, server, agent=never_closes))
        left = len(os.listdir("/proc/self/fd")) - before
        assert left <= 4, f"{left} descriptors are left of 6 clients"
    finally:
        gc.enable()


def never_closes(task: Any, llm: LLM) -> float:
    client = openai.OpenAI(base_url=llm.get_base_url(), api_key="none", max_retries=0)
    message = {"role": "user", "content": "1+1?"}
    client.chat.completions.create(model=llm.model, messages=[message])
    return 1.0
