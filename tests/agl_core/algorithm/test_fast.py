"""Baseline on real stores, with real runners."""

import asyncio
import logging

import pytest

from agl_core import emit_reward, rollout
from agl_core.adapter.base import TraceAdapter
from agl_core.adapter.triplet import TracerTraceToTriplet
from agl_core.algorithm.fast import Baseline
from agl_core.errors import ConfigError, TransientError
from agl_core.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agl_core.types.resources import PromptTemplate
from tests.agl_core.algorithm.runners import running

RESOURCES = {"prompt": PromptTemplate(template="{question}")}


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path):
    is_memory = request.param == "memory"
    opened = InMemoryLightningStore() if is_memory else SqliteLightningStore(tmp_path / "s.db")
    yield opened
    await opened.close()


@rollout
def agent(task, prompt_template):
    if task["do"] == "fail":
        raise RuntimeError("no")
    if task["do"] != "silent":
        emit_reward(task["do"])


def baseline(store: LightningStore, resources=RESOURCES, **options) -> Baseline:
    algorithm = Baseline(polling_interval=0.5, **options)
    algorithm.set_store(store)
    if resources is not None:
        algorithm.set_initial_resources(resources)
    return algorithm


async def test_every_row_runs_and_the_summary_has_only_rewards_that_were_given(store):
    algorithm = baseline(store, n_epochs=2)
    adapter = TracerTraceToTriplet()
    algorithm.set_adapter(adapter)
    async with running(store, agent):
        await algorithm.run(
            [{"do": 1.0}, {"do": 0.5}, {"do": "silent"}, {"do": "fail"}], [{"do": "silent"}]
        )
    train, val = algorithm.summary["train"], algorithm.summary["val"]
    assert train.ends == {"succeeded": 6, "agent_error": 2}
    assert sorted(train.rewards) == [0.5, 0.5, 1.0, 1.0]
    assert train.mean_reward == 0.75
    assert (val.ends, val.mean_reward) == ({"succeeded": 2}, None)
    assert "no reward" in str(val)
    rows = await store.query_rollouts()
    assert [r.mode for r in rows] == (["train"] * 4 + ["val"]) * 2
    assert {r.resources_id for r in rows} == {"default"}


async def test_what_an_adapter_raises_is_said_with_its_rollout_and_ends_nothing(store, caplog):
    class Picky(TraceAdapter):
        def adapt(self, source, /):
            raise LookupError("not mine")

    adapter = Picky()
    algorithm = baseline(store)
    algorithm.set_adapter(adapter)
    async with running(store, agent):
        await algorithm.run([{"do": 1.0}, {"do": 0.0}])
    summary = algorithm.summary["train"]
    assert set(summary.problems.values()) == {"LookupError: not mine"}
    assert summary.mean_reward == 0.5
    for rollout_id in summary.problems:
        assert f"rollout={rollout_id} could not be read: LookupError: not mine" in caplog.text


async def test_a_rollout_without_spans_is_a_problem_of_its_own(store):
    algorithm = baseline(store)
    run = asyncio.create_task(algorithm.run([{"do": 1.0}]))
    await asyncio.sleep(0.1)
    taken = await store.dequeue_rollout("w")
    await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="succeeded")
    await run
    assert algorithm.summary["train"].problems == {taken.rollout_id: "it has no spans"}


async def test_the_queue_stays_short(store):
    algorithm = baseline(store, max_queue_length=3)
    run = asyncio.create_task(algorithm.run([{"do": 1.0}] * 20))
    done = 0
    while done < 20:
        queued = (await store.query_rollouts(status_in=["queuing"], limit=0)).total
        assert queued <= 3
        if taken := await store.dequeue_rollout("w"):
            ids = (taken.rollout_id, taken.attempt.attempt_id)
            await store.update_attempt(*ids, status="succeeded")
            done += 1
        await asyncio.sleep(0.005)
    await run
    assert algorithm.summary["train"].ends == {"succeeded": 20}


async def test_agents_that_need_no_resources_run_without(store):
    from agl_core import LitAgent

    class Plain(LitAgent):
        def rollout(self, task, resources, rollout):
            return float(len(resources))

    algorithm = baseline(store, resources=None)
    async with running(store, Plain()):
        await algorithm.run([{}])
    assert algorithm.summary["train"].rewards == [0.0]


async def test_rollouts_that_nobody_takes_are_given_up_and_leave_the_queue(store):
    algorithm = baseline(store, stall_seconds=0.3)
    with pytest.raises(TransientError, match="no runner took one of 2 queued rollouts"):
        await algorithm.run([{"do": 1.0}] * 2)
    assert {r.status for r in await store.query_rollouts()} == {"cancelled"}


@pytest.mark.parametrize(("verbosity", "found"), [("keys", 1), ("key_values", 1), ("none", 0)])
async def test_spans_are_logged_as_asked_for(store, caplog, verbosity, found):
    caplog.set_level(logging.INFO, "agl_core.algorithm.fast")
    algorithm = baseline(store, span_verbosity=verbosity)
    async with running(store, agent):
        await algorithm.run([{"do": 0.125}])
    spans = [r.message for r in caplog.records if "agentlightning.reward.0.value" in r.message]
    assert len(spans) == found
    assert any("0.125" in line for line in spans) == (verbosity == "key_values")


@pytest.mark.parametrize("datasets", [(), ([], [])])
async def test_nothing_to_run_is_an_error(store, datasets):
    with pytest.raises(ConfigError, match="nothing to run"):
        await baseline(store).run(*datasets)


@pytest.mark.parametrize(
    "options",
    [
        {"n_epochs": 0},
        {"train_split": 0.3},
        {"polling_interval": 0},
        {"max_queue_length": 0},
        {"span_verbosity": "all"},
        {"stall_seconds": -1},
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused(options):
    with pytest.raises(ConfigError, match=f"Baseline: {next(iter(options))}"):
        Baseline(**options)
    assert Baseline(train_split=0.5)
