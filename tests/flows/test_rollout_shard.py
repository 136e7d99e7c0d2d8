"""A shard's flow on a real Prefect server, with a scripted model server."""

import asyncio
import json
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    FlowRunFilter,
    LogFilter,
)
from prefect.client.schemas.objects import State, TaskRun
from prefect.flow_engine import run_flow_async
from prefect.states import AwaitingRetry

from agl_core.config import RunConfig
from agl_core.errors import IterationStopped
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import BaseModelRecord, RunRecord, open_run
from agl_core.runner.failed import check_failures
from agl_core.runner.shard import ShardRef
from flows.rollout_shard import rollout_shard
from tasks.logs import MAX_AGENT_LINES
from tests.builders import POLICY, make_requests
from tests.fakes import ScriptedModelServer

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(weights_digest=POLICY.weights_digest) as running:
        yield running


def make_shard(
    ledger: str, server: ScriptedModelServer, agent: str, *ends: str, run_id: str, **values: Any
) -> tuple[ShardRef, RolloutSet]:
    """Write a run with one claimed set, a rollout for each end that its task asks for."""
    failures, rollout = values.pop("failures", {}), values
    config = RunConfig.model_validate(
        {
            "run_id": run_id,
            "ledger": ledger,
            "agent": f"tests.agents:{agent}",
            "train_data": "rows.jsonl",
            "algorithm": {"config": {}},
            "failures": failures,
            "rollout": rollout,
        }
    )
    run = open_run(ledger, run_id)
    base = BaseModelRecord(
        policy=POLICY, tokenizer_digest="", chat_template_digest=None, licence="unknown"
    )
    record: dict[str, Any] = {"code": {}, "packages": {}, "conditional_put": True, "created": 0.0}
    run.start(RunRecord(run_id=run_id, config=config, datasets={}, base=base, **record))
    rollouts = RolloutSet(run.iteration(0), "train")
    requests = make_requests(len(ends), samples=1)
    inputs = [json.dumps({"question": "1+1?", "ends": end}) for end in ends]
    column = requests.schema.get_field_index("input")
    table = requests.set_column(column, "input", pa.array(inputs, pa.string()))
    rollouts.write_requests(table, POLICY, {"max_tokens": 4})
    rollouts.claim(range(len(ends)))
    return ShardRef(
        ledger=ledger,
        conditional_put=True,
        run_id=run_id,
        iteration=0,
        rollout_set="train",
        claim=1,
        model_servers=(server.base_url.removesuffix("/v1"),),
        settings=config.rollout,
        failures=config.failures,
        start=1,
        concurrency=config.rollout.concurrency,
    ), rollouts


async def task_runs(shard: ShardRef, expected: int) -> dict[int, TaskRun]:
    """Return the task runs of a shard by index, once the server has them all in a final state."""
    names = FlowRunFilter.model_validate({"name": {"any_": [shard.name]}})
    deadline = time.monotonic() + 30
    async with get_client() as client:
        while True:
            runs = await client.read_task_runs(flow_run_filter=names)
            final = [run for run in runs if run.state and run.state.is_final()]
            if len(final) == expected:
                return {int(run.name.removeprefix("rollout-")): run for run in final}
            assert time.monotonic() < deadline, f"{len(final)} of {expected} task runs are final"
            await asyncio.sleep(0.5)


async def log_lines(run: TaskRun, expected: str) -> list[str]:
    """Return the log lines of a task run, once one of them says this."""
    query = LogFilter.model_validate({"task_run_id": {"any_": [str(run.id)]}})
    deadline = time.monotonic() + 30
    async with get_client() as client:
        while True:
            lines: list[str] = []
            while page := await client.read_logs(query, limit=200, offset=len(lines)):
                lines.extend(log.message for log in page)
            if any(expected in line for line in lines):
                return lines
            assert time.monotonic() < deadline, f"no line with {expected!r} among {lines}"
            await asyncio.sleep(0.5)


async def state_names(run: TaskRun) -> list[str]:
    async with get_client() as client:
        response = await client.request(
            "GET", "/task_run_states/", params={"task_run_id": str(run.id)}
        )
        return [state["name"] for state in response.json()]


async def test_a_failed_rollout_is_one_click_away(tmp_path: Path, server: ScriptedModelServer):
    shard, rollouts = make_shard(
        str(tmp_path),
        server,
        "fails_and_logs",
        *["succeeded", "agent_error", "infra_error", "no_reward", "chatty"],
        run_id="clicks",
        failures={"infra_error": {"delay_seconds": 0.3, "jitter": 0}},
    )
    summary = await rollout_shard(shard)
    assert summary.kinds == {"succeeded": 3, "agent_error": 1, "no_reward": 1}

    outcomes = rollouts.outcomes().select(["index", "attempt", "kind", "reward", "final"])
    assert [tuple(row.values()) for row in outcomes.to_pylist()] == [
        (0, 1, "succeeded", 1.0, True),
        (1, 1, "agent_error", None, True),
        (2, 1, "infra_error", None, False),
        (2, 2, "succeeded", 1.0, True),
        (3, 1, "no_reward", None, True),
        (4, 1, "succeeded", 1.0, True),
    ]

    runs = await task_runs(shard, 5)
    failed = runs[1]
    assert failed.state is not None
    assert "ro-1 agent_error: ValueError: the agent gave | up" in (failed.state.message or "")
    lines = await log_lines(failed, "Traceback")
    assert "attempt 1 of ro-1" in lines
    assert "a library warns ro-1" in lines
    assert not any("ro-2" in line for line in lines)
    assert "AwaitingRetry" in await state_names(runs[2])
    assert runs[2].run_count == 2
    assert "attempt 2 of ro-2" in await log_lines(runs[2], "attempt 2 of ro-2")
    chatter = await log_lines(runs[4], "further lines of this attempt are not shown")
    assert len([line for line in chatter if line.startswith("line ")]) == MAX_AGENT_LINES - 2

    async with get_client() as client:
        (page,) = await client.read_artifacts(
            artifact_filter=ArtifactFilter.model_validate(
                {"key": {"any_": ["clicks-failed-rollouts"]}}
            )
        )
    text = str(page.data)
    assert page.flow_run_id == failed.flow_run_id
    row = next(line for line in text.splitlines() if line.startswith("| [ro-1]("))
    message = r"`ValueError: the agent gave \| up (tests/agents.py:"
    assert f"| agent_error | 1 | {message}" in row
    assert " in fails_and_logs)` | `openai.chat.completion, UNSET, 0." in row
    assert f"/runs/task-run/{failed.id}) | agent_error" in row
    assert "ro-2" not in text
    assert "- no_reward: 1" in text


async def test_agents_in_the_event_loop_log_to_their_own_task_runs(
    tmp_path: Path, server: ScriptedModelServer
):
    shard, _ = make_shard(
        str(tmp_path),
        server,
        "fails_and_logs_in_the_loop",
        *["succeeded", "agent_error", "succeeded"],
        run_id="loop",
    )
    await rollout_shard(shard)
    for index, run in (await task_runs(shard, 3)).items():
        expected = f"attempt 1 of ro-{index}"
        lines = await log_lines(run, expected)
        assert [line for line in lines if line.startswith("attempt 1 of")] == [expected]


async def test_a_rollout_that_waits_for_its_retry_holds_no_slot(
    tmp_path: Path, server: ScriptedModelServer
):
    shard, rollouts = make_shard(
        str(tmp_path),
        server,
        "fails_and_logs",
        *["infra_error", "succeeded", "succeeded"],
        run_id="slots",
        failures={"infra_error": {"delay_seconds": 3, "jitter": 0}},
        concurrency=1,
    )
    await rollout_shard(shard)
    outcomes = rollouts.outcomes()
    ended = dict(
        zip(
            zip(outcomes["index"].to_pylist(), outcomes["attempt"].to_pylist(), strict=True),
            outcomes["started"].to_pylist(),
            strict=True,
        )
    )
    assert ended[0, 1] + 3 <= ended[0, 2]
    assert max(ended[1, 1], ended[2, 1]) < ended[0, 2]


async def test_a_broken_agent_does_not_burn_every_rollout(
    tmp_path: Path, server: ScriptedModelServer
):
    shard, rollouts = make_shard(
        str(tmp_path),
        server,
        "fails_and_logs",
        *["agent_error"] * 40,
        run_id="broken",
        failures={"give_up_after": 8, "min_success_fraction": 0.1},
        concurrency=2,
    )
    with pytest.raises(IterationStopped, match=r"none of the first failures\.give_up_after = 8"):
        await rollout_shard(shard)
    calls = len(server.requests)
    assert 8 <= calls <= 12, "those that ran beside the eighth one may have called"
    ended = 40 - len(rollouts.unfinished())
    assert 8 <= ended <= 9, "one may end together with the eighth"
    with pytest.raises(IterationStopped, match=rf"{ended} of 40 failed \({ended} agent_error\)"):
        check_failures(rollouts, shard.failures)
    async with get_client() as client:
        names = FlowRunFilter.model_validate({"name": {"any_": [shard.name]}})
        (run,) = await client.read_flow_runs(flow_run_filter=names)
    assert run.state is not None
    assert (run.state.message or "").startswith("the rollouts of train stop: none of the first")


async def retried(shard: ShardRef) -> State[Any]:
    """Do what the UI does for a retry, then what a worker does; return how that ended."""
    names = FlowRunFilter.model_validate({"name": {"any_": [shard.name]}})
    async with get_client() as client:
        (run,) = await client.read_flow_runs(flow_run_filter=names)
        await client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
        run = await client.read_flow_run(run.id)
    ended = run_flow_async(
        rollout_shard, flow_run=run, parameters={"shard": shard}, return_type="state"
    )
    state = await cast("Awaitable[State[Any]]", ended)
    async with get_client() as client:
        shown = (await client.read_flow_run(run.id)).state
    assert shown is not None
    assert (shown.type, shown.message) == (state.type, state.message)
    return state


async def test_a_retry_after_the_record_leaves_a_completed_shard_completed(
    tmp_path: Path, server: ScriptedModelServer
):
    ends = ["succeeded", "agent_error"]
    shard, rollouts = make_shard(str(tmp_path), server, "fails_and_logs", *ends, run_id="again")
    await rollout_shard(shard)
    state = await retried(shard)
    assert state.is_completed(), "nothing is recorded yet: the failed rollout runs again"
    assert len(rollouts.claims()) == 2
    with open_run(str(tmp_path), "again").iteration(0).stage("rollout") as stage:
        rollouts.record(stage)
    calls = len(server.requests)
    for _ in range(2):
        state = await retried(shard)
        assert state.is_completed()
        kept = "kept as it was: shard again-000000-train-0001 cannot be retried: stage rollout"
        assert (state.message or "").startswith(kept)
    assert (len(server.requests), len(rollouts.claims())) == (calls, 2)


async def test_a_retry_after_the_record_leaves_a_failed_shard_failed(
    tmp_path: Path, server: ScriptedModelServer
):
    limits = {"give_up_after": 1, "min_success_fraction": 0.1}
    shard, rollouts = make_shard(
        str(tmp_path), server, "fails_and_logs", "agent_error", run_id="red", failures=limits
    )
    with pytest.raises(IterationStopped):
        await rollout_shard(shard)
    with open_run(str(tmp_path), "red").iteration(0).stage("rollout") as stage:
        rollouts.record(stage)
    state = await retried(shard)
    assert state.is_failed()
    assert (state.message or "").startswith("shard red-000000-train-0001 cannot be retried")
