"""Agents in processes of their own: real processes that exit, crash and hang."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from agl_core.config import RolloutSettings
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.spans import numeric_annotations
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.storage import open_storage
from agl_core.litagent.decorator import load_agent
from agl_core.runner.shard import Shard, ShardRef
from agl_core.types.outcome import AttemptOutcome
from tests.builders import POLICY, make_requests
from tests.fakes import ScriptedModelServer


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(weights_digest=POLICY.weights_digest) as running:
        yield running


def make_shard(
    folder: Path, server: ScriptedModelServer, agent: str, ends: list[str], **settings: Any
) -> Shard:
    rollouts = RolloutSet(IterationLedger(open_storage(str(folder)), "run", 0), "train")
    requests = make_requests(len(ends))
    inputs = [json.dumps({"question": "1+1?", "ends": end}) for end in ends]
    column = requests.schema.get_field_index("input")
    table = requests.set_column(column, "input", pa.array(inputs, pa.string()))
    rollouts.write_requests(table, POLICY, {"max_tokens": 4})
    rollouts.claim(range(len(ends)))
    ref = ShardRef(
        ledger=str(folder),
        conditional_put=True,
        run_id="run",
        iteration=0,
        rollout_set="train",
        claim=1,
        model_servers=(server.base_url.removesuffix("/v1"),),
        settings=RolloutSettings(isolation="process", **settings),
        start=1,
        concurrency=8,
    )
    name = f"tests.agents:{agent}"
    return Shard(ref, rollouts, table.to_pylist(), load_agent(name), name)


async def run(shard: Shard) -> dict[str, tuple[AttemptOutcome, dict[str, float]]]:
    """Run every rollout once; return outcome and annotations by how its task ends."""
    found: dict[str, tuple[AttemptOutcome, dict[str, float]]] = {}
    async with shard.serving():
        for index in shard.indices:
            outcome = await shard.run_attempt(index, attempt=1)
            (attempt,) = shard._attempts[index]
            end = json.loads(shard._requests[index]["input"])["ends"]
            found[end] = outcome, numeric_annotations(attempt.spans)
    return found


def is_alive(pid: float) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{int(pid)}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(*pids: float) -> None:
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{alive} still run"
        time.sleep(0.05)


async def test_an_agent_that_takes_its_process_along_fails_its_rollout_alone(
    tmp_path: Path, server: ScriptedModelServer
):
    ends = ["return", "exit", "segfault", "raise", "nothing", "emit", "return again"]
    found = await run(make_shard(tmp_path, server, "ends_its_process", ends))
    kinds = {end: (outcome.kind.value, outcome.message) for end, (outcome, _) in found.items()}
    assert kinds == {
        "return": ("succeeded", ""),
        "exit": ("agent_error", "the agent's process ended: exit code 7"),
        "segfault": ("agent_error", "the agent's process ended: killed by SIGSEGV"),
        "raise": ("infra_error", "ConnectionError: lost"),
        "nothing": ("no_reward", "the agent neither returned nor emitted a reward"),
        "emit": ("succeeded", ""),
        "return again": ("succeeded", ""),
    }
    assert "in ends_its_process" in found["raise"][0].traceback
    assert found["return"][0].reward == 1.0
    assert found["emit"][0].reward == 0.5
    assert all(outcome.num_calls == 1 for outcome, _ in found.values())
    pids = {end: notes["pid"] for end, (_, notes) in found.items()}
    assert pids["return"] == pids["exit"], "a process is used again"
    assert pids["exit"] != pids["segfault"] != pids["raise"]
    assert pids["raise"] == pids["return again"]
    assert os.getpid() not in pids.values()
    wait_until_gone(*pids.values())


async def test_a_coroutine_runs_in_a_process_too(tmp_path: Path, server: ScriptedModelServer):
    found = await run(make_shard(tmp_path, server, "ends_in_the_loop", ["return", "exit"]))
    assert found["return"][0].reward == 1.0
    assert found["exit"][0].message == "the agent's process ended: exit code 7"


async def test_a_sync_agent_runs_in_the_main_thread_of_its_process(
    tmp_path: Path, server: ScriptedModelServer
):
    ends = ["return", "in a loop of its own", "left behind", "return again"]
    found = await run(make_shard(tmp_path, server, "verifies_with_an_alarm", ends))
    assert [outcome.message for outcome, _ in found.values()] == [""] * 4
    assert [outcome.reward for outcome, _ in found.values()] == [1.0] * 4
    assert len({notes["pid"] for _, notes in found.values()}) == 1


async def test_the_deadline_holds_whatever_the_agent_does(
    tmp_path: Path, server: ScriptedModelServer
):
    shard = make_shard(tmp_path, server, "ends_its_process", ["hang", "return"], timeout_seconds=2)
    found = await run(shard)
    outcome, notes = found["hang"]
    assert outcome.kind.value == "timeout"
    assert outcome.message == "the agent did not return within 2 s and was killed"
    assert outcome.duration_seconds < 60
    assert outcome.num_calls == 1, "what it did until then is recorded"
    assert found["return"][0].reward == 1.0
    wait_until_gone(notes["pid"], notes["child"])


async def test_spans_are_below_the_attempts_root_in_the_order_in_which_they_ended(
    tmp_path: Path, server: ScriptedModelServer
):
    shard = make_shard(tmp_path, server, "ends_its_process", ["emit"])
    await run(shard)
    ((attempt,),) = shard._attempts.values()
    root = attempt.spans[-1].get_span_context()
    assert root is not None
    names = [span.name for span in attempt.spans]
    assert len(names) == 4
    assert names[-1] == "agentlightning.rollout"
    for span in attempt.spans[:-1]:
        context = span.get_span_context()
        assert context is not None
        assert context.trace_id == root.trace_id
        assert span.parent is not None
        assert span.parent.span_id == root.span_id


async def test_what_the_agent_logs_comes_out_here(
    tmp_path: Path, server: ScriptedModelServer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", logger="tests")
    found = await run(make_shard(tmp_path, server, "ends_its_process", ["return"]))
    pid = int(found["return"][1]["pid"])
    assert ("tests.agents", 20, f"in process {pid}") in caplog.record_tuples


def test_processes_end_with_a_shard_that_is_killed(tmp_path: Path):
    """SIGKILL while an agent holds its interpreter's lock, with a child of its own."""
    script = f"""
import asyncio, json
from pathlib import Path
from tests.agl_core.runner.test_agent_pool import POLICY, ScriptedModelServer, make_shard
from agl_core.tracer.attempt_trace import AttemptTrace

add = AttemptTrace.add
def tell(self, span):
    for name in ("pid", "child"):
        if name in (span.attributes or {{}}):
            print(span.attributes[name], flush=True)
    return add(self, span)
AttemptTrace.add = tell

async def main():
    with ScriptedModelServer(weights_digest=POLICY.weights_digest) as server:
        shard = make_shard(Path({str(tmp_path)!r}), server, "ends_its_process", ["hang"])
        async with shard.serving():
            await shard.run_attempt(0, attempt=1)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [float(process.stdout.readline()) for _ in range(2)]
        assert all(is_alive(pid) for pid in pids)
        process.send_signal(signal.SIGKILL)
    wait_until_gone(*pids)
