"""The rollouts of a set through a real store, with real runners and a scripted model server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pyarrow as pa
import pytest

from agl_core import rollout
from agl_core.algorithm.store_rollouts import RUN_ID, StoreRollouts, cancel_leftovers
from agl_core.config import RolloutSettings
from agl_core.errors import IterationStopped, LedgerError, TransientError
from agl_core.failures import FailureSettings
from agl_core.ledger.rollout_set import Chunk, RolloutSet
from agl_core.ledger.run import open_run
from agl_core.llm_proxy import Backend, LLMProxy
from agl_core.llm_proxy.capture import call_seed
from agl_core.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agl_core.types.resources import LLM
from tests.agl_core.algorithm.runners import running
from tests.builders import POLICY, make_requests
from tests.fakes import ScriptedModelServer

SAMPLING = {"temperature": 1.0, "max_tokens": 8}
EAGER = {"delay_seconds": 0.05, "jitter": 0.0}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModelServer]:
    policy = {"policy_version": POLICY.version, "weights_digest": POLICY.weights_digest}
    with ScriptedModelServer(model=POLICY.version, **policy) as running_server:
        yield running_server


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path):
    is_memory = request.param == "memory"
    opened = InMemoryLightningStore() if is_memory else SqliteLightningStore(tmp_path / "s.db")
    yield opened
    await opened.close()


class SetOfFour:
    """Four rollouts in two groups, and what becomes of them."""

    def __init__(self, folder: Path, tasks: list[Any], **failures: Any) -> None:
        self.ledger = open_run(str(folder / "ledger"), "run")
        self.rollouts = RolloutSet(self.ledger.iteration(0), "train")
        rows = [
            row | {"input": json.dumps(tasks[row["index"]])}
            for row in make_requests(len(tasks)).to_pylist()
        ]
        table = pa.Table.from_pylist(rows, schema=make_requests(0).schema)
        self.rollouts.write_requests(table, POLICY, SAMPLING)
        settings = {"min_success_fraction": 0.0, **failures}
        self.config = SimpleNamespace(
            failures=FailureSettings.model_validate(settings),
            rollout=RolloutSettings(
                timeout_seconds=20.0, flush_seconds=0.1, startup_timeout_seconds=0.5
            ),
        )

    async def run(self, store: LightningStore, server: ScriptedModelServer) -> None:
        proxy = LLMProxy(store=store)
        run: Any = SimpleNamespace(ledger=self.ledger, config=self.config)
        async with proxy.serving([Backend(server.base_url)], POLICY, SAMPLING, 20.0) as llm:
            resources = await store.add_resources({"main_llm": llm})
            claim = self.rollouts.claim(self.rollouts.unfinished())
            running_set = StoreRollouts(run, self.rollouts, store, proxy)
            await running_set.run(claim, resources.resources_id)

    def ends(self) -> list[tuple[int, int, str, float | None, bool]]:
        names = ["index", "attempt", "kind", "reward", "final"]
        return [tuple(row[n] for n in names) for row in self.rollouts.outcomes().to_pylist()]


@rollout
def agent(task, llm: LLM):
    """Does what its task says."""
    if task["do"] == "raise":
        raise RuntimeError("broken")
    if task["do"] == "no call":
        return 1.0
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", max_retries=0)
    with client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "hello"}]
        )
    return task.get("reward")


async def test_what_runners_do_becomes_outcomes_and_spans(store, server, tmp_path):
    tasks = [{"do": "call", "reward": 0.5}, {"do": "raise"}, {"do": "no call"}, {"do": "call"}]
    one = SetOfFour(tmp_path, tasks)
    async with running(store, agent):
        await one.run(store, server)
    assert one.ends() == [
        (0, 1, "succeeded", 0.5, True),
        (1, 1, "agent_error", None, True),
        (2, 1, "no_trace", None, True),
        (3, 1, "no_reward", None, True),
    ]
    assert one.rollouts.unfinished() == []
    outcomes = one.rollouts.outcomes().to_pylist()
    assert outcomes[1]["message"].startswith("RuntimeError: broken (")
    assert "no model call was recorded" in outcomes[2]["message"]
    assert [row["num_calls"] for row in outcomes] == [1, 0, 0, 1]
    spans = pa.concat_tables(one.rollouts.iter_spans())
    calls = [row for row in spans.to_pylist() if row["prompt_token_ids"]]
    assert {row["rollout_id"] for row in calls} == {"ro-0", "ro-3"}
    assert {row["policy_version"] for row in calls} == {POLICY.version}
    seeds = {row["index"]: json.loads(row["attributes"])["gen_ai.request.seed"] for row in calls}
    assert seeds == {0: call_seed(0, 0), 3: call_seed(3, 0)}, "those of the requests"


async def test_a_failure_is_tried_again_by_its_kinds_policy(store, server, tmp_path):
    tries: list[int] = []

    @rollout
    def fails_once(task, llm: LLM):
        tries.append(task["row"])
        if tries.count(task["row"]) == 1:
            raise RuntimeError("broken")
        return agent({"do": "call", "reward": 1.0}, llm)

    one = SetOfFour(
        tmp_path, [{"row": 0}, {"row": 1}], agent_error={"attempts": 3, "then": "mask"} | EAGER
    )
    async with running(store, fails_once):
        await one.run(store, server)
    assert one.ends() == [
        (0, 1, "agent_error", None, False),
        (0, 2, "succeeded", 1.0, True),
        (1, 1, "agent_error", None, False),
        (1, 2, "succeeded", 1.0, True),
    ]
    assert len({row.rollout_id for row in await store.query_rollouts()}) == 4


async def test_too_many_failures_stop_the_set_and_the_rest_is_cancelled(store, server, tmp_path):
    one = SetOfFour(
        tmp_path, [{"do": "raise"}] + [{"do": "call"}] * 3, agent_error={"then": "fail"}
    )
    taken = asyncio.Event()

    @rollout
    async def first_raises(task, llm: LLM):
        if task["do"] == "raise":
            raise RuntimeError("broken")
        taken.set()
        await asyncio.sleep(30)

    async with running(store, first_raises, concurrency=2):
        with pytest.raises(IterationStopped, match="RuntimeError: broken"):
            await one.run(store, server)
    assert one.ends() == [(0, 1, "agent_error", None, True)], "kept, and not run again"
    statuses = [row.status for row in await store.query_rollouts()]
    assert sorted(statuses) == ["cancelled", "cancelled", "cancelled", "failed"]


async def test_rollouts_that_no_runner_takes_are_an_error_that_says_so(store, server, tmp_path):
    one = SetOfFour(tmp_path, [{"do": "call"}] * 2)
    with pytest.raises(TransientError, match="rollouts of train: no runner took one of 2"):
        await one.run(store, server)
    assert {row.status for row in await store.query_rollouts()} == {"cancelled"}


async def test_what_somebody_cancels_in_the_store_is_a_cancelled_rollout(store, server, tmp_path):
    one = SetOfFour(tmp_path, [{"do": "call"}])
    run = asyncio.create_task(one.run(store, server))
    while not (queued := await store.query_rollouts(status_in=["queuing"])):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await store.update_rollout(queued[0].rollout_id, status="cancelled")
    await run
    assert one.ends() == [(0, 1, "cancelled", None, True)]


async def test_what_a_killed_process_left_in_the_store_is_cancelled(store):
    mine = await store.enqueue_rollout({}, metadata={RUN_ID: "run"})
    running_one = await store.start_rollout({}, metadata={RUN_ID: "run"})
    other = await store.enqueue_rollout({}, metadata={RUN_ID: "other"})
    plain = await store.enqueue_rollout({})
    await cancel_leftovers(store, "run")
    found = {row.rollout_id: row.status for row in await store.query_rollouts()}
    assert found[mine.rollout_id] == found[running_one.rollout_id] == "cancelled"
    assert found[other.rollout_id] == found[plain.rollout_id] == "queuing"


class FullDisk(RolloutSet):
    """Refuses its first writes of a chunk."""

    refusals = 1

    def put_chunk(self, claim: int, number: int, spans: pa.Table, outcomes: pa.Table) -> Chunk:
        self.refusals -= 1
        if self.refusals >= 0:
            raise LedgerError("no space left")
        return super().put_chunk(claim, number, spans, outcomes)


@pytest.mark.parametrize("refusals", [1, 100])
async def test_a_flush_that_fails_is_tried_again_and_the_last_one_counts(
    server, tmp_path, caplog, refusals
):
    one = SetOfFour(tmp_path, [{"do": "call", "reward": 0.5}, {"do": "raise"}])
    one.rollouts = FullDisk(one.ledger.iteration(0), "train")
    one.rollouts.refusals = refusals
    store = InMemoryLightningStore()
    async with running(store, agent):
        if refusals > 1:
            with pytest.raises(LedgerError, match="no space left"):
                await one.run(store, server)
        else:
            await one.run(store, server)
            assert [end[:3] for end in one.ends()] == [(0, 1, "succeeded"), (1, 1, "agent_error")]
    assert "could not flush, will try again: no space left" in caplog.text
