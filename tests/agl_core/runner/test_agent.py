"""A runner over real stores: every attempt ends with a reason, and the runner goes on."""

import asyncio
import pickle
import re
import sys
import threading
from typing import Any

import pytest

from agl_core import semconv
from agl_core.emitter import emit_annotation, emit_reward, find_final_reward
from agl_core.errors import ConfigError, StoreError, TransientError
from agl_core.litagent import LitAgent, rollout
from agl_core.runner import LitAgentRunner
from agl_core.store import InMemoryLightningStore, LightningStore
from agl_core.tracer import DummyTracer, OtelTracer
from agl_core.types.core import Attempt, RolloutConfig
from agl_core.types.outcome import FailureKind
from agl_core.types.tracer import Span, SpanCoreFields
from tests.agl_core.runner.conftest import RESOURCES, StartRunner


class Echo(LitAgent[Any]):
    """Returns what it is told to, or raises it."""

    def rollout(self, task, resources, rollout):
        if isinstance(task, BaseException):
            raise task
        return task


async def latest(store: LightningStore, rollout_id: str) -> Attempt:
    attempt = await store.get_latest_attempt(rollout_id)
    assert attempt is not None
    return attempt


async def run_queue(
    store: LightningStore, start_runner: StartRunner, agent: Any, *tasks: Any, **options: Any
) -> list[Attempt]:
    """Run one rollout for each task and return their last attempts."""
    config = RolloutConfig(**options.pop("config", {}))
    await store.add_resources(RESOURCES)
    queued = [await store.enqueue_rollout(task, config=config) for task in tasks]
    runner = start_runner(agent, **{"max_rollouts": len(tasks)} | options)
    await asyncio.wait_for(runner.iter(), 30)
    return [await latest(store, q.rollout_id) for q in queued]


@rollout
async def async_agent(task, llm):
    await asyncio.sleep(0)
    emit_annotation({"task": task})
    return float(task)


@rollout
def sync_agent(task, llm):
    emit_annotation({"task": task})
    return float(task)


# What an agent may return.


@pytest.mark.parametrize("agent", [async_agent, sync_agent])
async def test_a_returned_number_is_the_reward_below_the_root_of_the_trace(
    store, start_runner, agent
):
    (attempt,) = await run_queue(store, start_runner, agent, 3)
    assert (attempt.status, attempt.failure_kind) == ("succeeded", None)
    assert attempt.worker_id == "Worker-0"
    spans = await store.query_spans(attempt.rollout_id, attempt.attempt_id)
    assert find_final_reward(spans) == 3.0
    names = [semconv.ANNOTATION_SPAN] * 2 + [semconv.ROLLOUT_SPAN]
    assert sorted(span.name for span in spans) == sorted(names)
    (reward,) = [s for s in spans if semconv.PRIMARY_REWARD_VALUE in s.attributes]
    (root,) = [s for s in spans if s.parent_id is None]
    assert reward.attributes == {
        semconv.PRIMARY_REWARD_NAME: "primary",
        semconv.PRIMARY_REWARD_VALUE: 3.0,
    }
    assert (reward.parent_id, reward.trace_id) == (root.span_id, root.trace_id)
    assert attempt.metadata is not None
    assert attempt.metadata["n_spans"] == 3
    assert (attempt.metadata["n_llm_calls"], attempt.metadata["n_without_ids"]) == (0, 0)
    assert (attempt.metadata["reward"], attempt.metadata["reward_source"]) == (3.0, "returned")


@pytest.mark.parametrize(("returned", "reward"), [(True, 1.0), (2, 2.0), (0.5, 0.5)])
async def test_any_number_is_a_reward(store, start_runner, returned, reward):
    runner = start_runner(Echo())
    finished = await runner.step(returned, resources=RESOURCES)
    assert finished.status == "succeeded"
    assert find_final_reward(await store.query_spans(finished.rollout_id)) == reward


async def test_none_leaves_what_was_recorded(store, start_runner):
    def agent(task, llm):
        emit_reward(0.25)

    (attempt,) = await run_queue(store, start_runner, agent, "t")
    assert attempt.status == "succeeded"
    assert find_final_reward(await store.query_spans(attempt.rollout_id)) == 0.25
    assert attempt.metadata["reward_source"] == "emitted"


async def test_an_attempt_without_calls_and_reward_is_no_failure(store, start_runner):
    (attempt,) = await run_queue(store, start_runner, lambda task, llm: None, "t")
    assert (attempt.status, attempt.metadata["reward_source"]) == ("succeeded", None)


async def test_returned_fields_become_spans_below_the_root(store, start_runner):
    def agent(task, llm):
        return [SpanCoreFields(name="a"), emit_reward(0.5, propagate=False)]

    (attempt,) = await run_queue(store, start_runner, agent, "t")
    spans = await store.query_spans(attempt.rollout_id)
    (root,) = [s for s in spans if s.parent_id is None]
    assert [s.name for s in spans if s.parent_id == root.span_id] == ["a", semconv.ANNOTATION_SPAN]
    assert find_final_reward(spans) == attempt.metadata["reward"] == 0.5
    assert attempt.metadata["reward_source"] == "returned_spans"


async def test_returned_spans_of_the_attempt_are_kept(store, start_runner):
    def agent(task, llm, rollout):
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        return [Span.from_attributes(name="mine", attributes={"x": 1}, sequence_id=50, **ids)]

    (attempt,) = await run_queue(store, start_runner, agent, "t")
    assert (await store.query_spans(attempt.rollout_id))[-1].name == "mine"


@pytest.mark.parametrize(("number", "reward"), [(0, 0.25), (50, 0.75)])
async def test_the_reward_of_an_attempt_is_the_last_one_in_the_order_of_the_store(
    store, start_runner, number, reward
):
    def agent(task, llm, rollout):
        emit_reward(0.25)
        span = Span.from_core_fields(
            emit_reward(0.75, propagate=False),
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=number,
        )
        return [span]

    (attempt,) = await run_queue(store, start_runner, agent, "t")
    spans = await store.query_spans(attempt.rollout_id)
    assert find_final_reward(spans) == attempt.metadata["reward"] == reward


async def test_returned_spans_of_another_attempt_are_an_agent_error(store, start_runner):
    other = Span.from_attributes(name="x", attributes={}, rollout_id="ro-2", attempt_id="at-2")
    (attempt,) = await run_queue(store, start_runner, lambda task, llm: [other], "t")
    assert (attempt.status, attempt.failure_kind) == ("failed", FailureKind.AGENT_ERROR)
    assert "span 'x' of rollout 'ro-2'" in attempt.failure_message


async def test_returned_opentelemetry_spans_are_kept_once(store, start_runner):
    def agent(task, llm):
        other = OtelTracer()
        with other.attempt("ro", "at") as trace:
            emit_reward(0.75)
        return trace.spans()

    (attempt,) = await run_queue(store, start_runner, agent, "t")
    spans = await store.query_spans(attempt.rollout_id)
    assert len(spans) == len({s.span_id for s in spans}) == 3
    assert find_final_reward(spans) == 0.75


async def test_an_empty_list_is_fine_and_said(store, start_runner, caplog):
    (attempt,) = await run_queue(store, start_runner, lambda task, llm: [], "t")
    assert attempt.status == "succeeded"
    assert "returned an empty list" in caplog.text


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("1.0", "TypeError: Invalid raw result type"),
        ({"reward": 1.0}, "TypeError: Invalid raw result type"),
        ([1.0], "TypeError: Invalid raw result type"),
        (float("inf"), "ValueError: a reward must be finite"),
        (
            [SpanCoreFields(name="a"), Span.from_attributes(attributes={})],
            "ValueError: Invalid raw result type: the agent returned spans of different kinds: "
            "Span, SpanCoreFields",
        ),
    ],
)
async def test_any_other_return_value_fails_the_attempt(store, start_runner, returned, words):
    (attempt,) = await run_queue(store, start_runner, lambda task, llm: returned, "t")
    assert (attempt.status, attempt.failure_kind) == ("failed", FailureKind.AGENT_ERROR)
    assert words in attempt.failure_message


async def test_a_reward_that_the_tracer_does_not_keep_reaches_the_store(store, start_runner):
    (attempt,) = await run_queue(store, start_runner, sync_agent, 3, tracer=DummyTracer())
    spans = await store.query_spans(attempt.rollout_id)
    assert find_final_reward(spans) == 3.0
    assert len(spans) == 1
    crowded = OtelTracer(max_spans_per_attempt=1)
    (attempt,) = await run_queue(store, start_runner, sync_agent, 4, tracer=crowded)
    assert find_final_reward(await store.query_spans(attempt.rollout_id)) == 4.0
    assert attempt.metadata["n_dropped_spans"] == 1


# How an attempt ends.


async def test_an_error_of_the_agent_fails_the_attempt_and_the_runner_goes_on(store, start_runner):
    def agent(task, llm):
        return 1 / task

    bad, good = await run_queue(store, start_runner, agent, 0, 1)
    assert (bad.status, bad.failure_kind) == ("failed", FailureKind.AGENT_ERROR)
    message, _, where = bad.failure_message.partition(" (")
    assert message == "ZeroDivisionError: division by zero"
    assert re.fullmatch(r"tests/agl_core/runner/test_agent\.py:\d+ in agent\)", where)
    assert good.status == "succeeded"


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_exit_of_the_agent_is_its_error_and_the_runner_goes_on(
    store, start_runner, is_async
):
    async def exits(task, llm):
        return 1.0 if task else sys.exit(3)

    def exits_sync(task, llm):
        return 1.0 if task else sys.exit(3)

    bad, good = await run_queue(store, start_runner, exits if is_async else exits_sync, 0, 1)
    assert (bad.status, bad.failure_kind) == ("failed", FailureKind.AGENT_ERROR)
    assert "SystemExit: 3" in bad.failure_message
    assert good.status == "succeeded"


class Stop(BaseException):
    """What a library may raise to be caught by itself alone."""


OWN = [Stop("lib"), GeneratorExit(), BaseExceptionGroup("both", [Stop(), ValueError()])]


@pytest.mark.parametrize("error", [*OWN, KeyboardInterrupt()], ids=repr)
async def test_any_exception_of_a_sync_agent_is_its_error_and_is_retried(
    store, start_runner, error
):
    def agent(task, llm, rollout):
        if rollout.attempt.sequence_id == 1:
            raise error
        return 1.0

    config = {"max_attempts": 2, "retry_condition": ["failed"]}
    (last,) = await run_queue(store, start_runner, agent, 0, config=config, max_rollouts=2)
    assert last.status == "succeeded"
    first = (await store.query_attempts(last.rollout_id))[0]
    assert (first.status, first.failure_kind) == ("failed", FailureKind.AGENT_ERROR)
    assert type(error).__name__ in first.failure_message


@pytest.mark.parametrize("error", OWN, ids=repr)
async def test_any_exception_of_an_async_agent_is_its_error_and_the_runner_goes_on(
    store, start_runner, error
):
    async def agent(task, llm):
        if not task:
            raise error
        return 1.0

    bad, good = await run_queue(store, start_runner, agent, 0, 1)
    assert (bad.status, bad.failure_kind) == ("failed", FailureKind.AGENT_ERROR)
    assert type(error).__name__ in bad.failure_message
    assert good.status == "succeeded"


async def test_an_error_of_the_network_is_told_apart(store, start_runner):
    def agent(task, llm):
        raise ConnectionError("no route")

    (attempt,) = await run_queue(store, start_runner, agent, "t")
    assert (attempt.status, attempt.failure_kind) == ("failed", FailureKind.INFRA_ERROR)


async def test_missing_resources_end_the_attempt(store, start_runner):
    queued = await store.enqueue_rollout("t")
    await asyncio.wait_for(start_runner(async_agent, max_rollouts=1).iter(), 10)
    attempt = await latest(store, queued.rollout_id)
    assert (attempt.status, attempt.failure_kind) == ("failed", FailureKind.INFRA_ERROR)
    assert "the store has no resources yet" in attempt.failure_message
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "failed"


async def test_a_resource_that_the_agent_lacks_ends_the_attempt(store, start_runner):
    await store.add_resources({"main_llm": RESOURCES["main_llm"]})
    runner = start_runner(lambda task, prompt_template: 1.0)
    with pytest.raises(ConfigError, match="takes prompt_template"):
        await runner.step("t")
    (found,) = await store.query_rollouts()
    attempt = await latest(store, found.rollout_id)
    assert (attempt.status, attempt.failure_kind) == ("failed", FailureKind.AGENT_ERROR)


async def test_a_hung_async_agent_times_out_and_the_worker_goes_on(store, start_runner):
    async def agent(task, llm):
        if task == "hang":
            await asyncio.sleep(60)
        return 1.0

    hung, next_one = await run_queue(
        store, start_runner, agent, "hang", "go", config={"timeout_seconds": 0.5}
    )
    assert (hung.status, hung.failure_kind) == ("timeout", FailureKind.TIMEOUT)
    assert next_one.status == "succeeded"


async def test_a_hung_sync_agent_times_out_and_its_thread_is_counted(store, start_runner):
    release = threading.Event()

    def agent(task, llm):
        if task == "hang":
            release.wait(30)
        return 1.0

    await store.add_resources(RESOURCES)
    config = RolloutConfig(timeout_seconds=0.5)
    queued = [await store.enqueue_rollout(task, config=config) for task in ("hang", "go")]
    runner = start_runner(agent, max_rollouts=2)
    await asyncio.wait_for(runner.iter(), 10)
    hung, next_one = [await latest(store, q.rollout_id) for q in queued]
    assert (hung.status, hung.failure_kind) == ("timeout", FailureKind.TIMEOUT)
    assert next_one.status == "succeeded"
    assert runner.leaks.threads == 1
    release.set()


async def test_a_runner_with_too_many_hung_threads_takes_no_more_rollouts(store, start_runner):
    release = threading.Event()

    def agent(task, llm):
        release.wait(30)

    await store.add_resources(RESOURCES)
    config = RolloutConfig(timeout_seconds=0.2)
    queued = [await store.enqueue_rollout(n, config=config) for n in range(6)]
    runner = start_runner(agent, max_leaked_threads=2)
    with pytest.raises(TransientError, match=r"3 agents still run .*max_leaked_threads is 2"):
        await asyncio.wait_for(runner.iter(), 20)
    release.set()
    found = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in queued]
    assert [rollout.status for rollout in found] == ["failed"] * 3 + ["queuing"] * 3


async def test_a_timeout_is_retried_where_the_config_says_so(store, start_runner):
    calls = []

    async def agent(task, llm):
        calls.append(task)
        if len(calls) == 1:
            await asyncio.sleep(60)
        return 1.0

    config = {"timeout_seconds": 0.5, "max_attempts": 2, "retry_condition": ["timeout"]}
    (attempt,) = await run_queue(store, start_runner, agent, "t", config=config, max_rollouts=2)
    assert (attempt.sequence_id, attempt.status) == (2, "succeeded")


async def test_spans_that_the_store_refuses_fail_the_attempt(start_runner, store, monkeypatch):
    async def refuse(spans):
        raise StoreError("disk full")

    monkeypatch.setattr(store, "add_many_spans", refuse)
    (attempt,) = await run_queue(store, start_runner, async_agent, 1)
    assert (attempt.status, attempt.failure_kind) == ("failed", FailureKind.INFRA_ERROR)
    assert "disk full" in attempt.failure_message


async def test_spans_are_in_the_store_before_the_status(store, start_runner, monkeypatch):
    seen = []
    update = store.update_attempt

    async def watch(rollout_id, attempt_id, **fields):
        seen.append(len(await store.query_spans(rollout_id)))
        return await update(rollout_id, attempt_id, **fields)

    monkeypatch.setattr(store, "update_attempt", watch)
    await run_queue(store, start_runner, async_agent, 1)
    assert seen == [3]


# Cancellation.


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_cancelled_rollout_stops_its_agent_and_the_runner_goes_on(
    store, start_runner, kind
):
    entered, stopped, release = threading.Event(), [], threading.Event()

    async def hangs(task, llm):
        if task == "go":
            return 1.0
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(task)

    def hangs_sync(task, llm):
        if task != "go":
            entered.set()
            release.wait(30)
        return 1.0

    await store.add_resources(RESOURCES)
    hung, queued = await store.enqueue_rollout("hang"), await store.enqueue_rollout("go")
    runner = start_runner(hangs if kind == "async" else hangs_sync, max_rollouts=2)
    work = asyncio.create_task(runner.iter())
    await asyncio.to_thread(entered.wait, 10)
    await store.update_rollout(hung.rollout_id, status="cancelled")
    await asyncio.wait_for(work, 10)
    attempt = await latest(store, hung.rollout_id)
    assert (attempt.status, attempt.failure_kind) == ("cancelled", FailureKind.CANCELLED)
    assert (await store.get_rollout_by_id(hung.rollout_id)).status == "cancelled"
    assert (await latest(store, queued.rollout_id)).status == "succeeded"
    assert stopped == (["hang"] if kind == "async" else [])
    assert runner.leaks.threads == (0 if kind == "async" else 1)
    release.set()


async def test_a_runner_that_is_cancelled_says_so_and_never_success(store, start_runner):
    entered = asyncio.Event()

    async def agent(task, llm):
        emit_annotation({"seen": True})
        entered.set()
        await asyncio.sleep(60)

    await store.add_resources(RESOURCES)
    queued = await store.enqueue_rollout("t")
    work = asyncio.create_task(start_runner(agent).iter())
    await entered.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    attempt = await latest(store, queued.rollout_id)
    assert (attempt.status, attempt.failure_kind) == ("unresponsive", FailureKind.INFRA_ERROR)
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "failed"
    assert "the runner was stopped" in attempt.failure_message
    assert len(await store.query_spans(queued.rollout_id)) == 2


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_rollout_of_a_stopped_runner_goes_to_another_one_where_the_config_says_so(
    store, start_runner, kind
):
    entered, release = threading.Event(), threading.Event()

    async def hangs(task, llm, rollout):
        if rollout.attempt.sequence_id == 1:
            entered.set()
            await asyncio.sleep(60)
        return 1.0

    def hangs_sync(task, llm, rollout):
        if rollout.attempt.sequence_id == 1:
            entered.set()
            release.wait(30)
            emit_annotation({"late": True})
        return 1.0

    await store.add_resources(RESOURCES)
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
    queued = await store.enqueue_rollout("t", config=config)
    agent = hangs if kind == "async" else hangs_sync
    work = asyncio.create_task(start_runner(agent).iter())
    await asyncio.to_thread(entered.wait, 10)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    release.set()
    await asyncio.sleep(0.2)
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "requeuing"
    await asyncio.wait_for(start_runner(agent, max_rollouts=1, worker_id=1).iter(), 20)
    finished = await store.get_rollout_by_id(queued.rollout_id)
    assert (finished.status, finished.attempt.sequence_id) == ("succeeded", 2)


def test_an_interrupt_in_the_event_loop_ends_the_run_and_is_no_success(tmp_path):
    store = InMemoryLightningStore()

    async def agent(task, llm):
        raise KeyboardInterrupt

    async def work():
        await store.add_resources(RESOURCES)
        await store.enqueue_rollout("t")
        runner = LitAgentRunner[Any](OtelTracer())
        with runner.run_context(agent=rollout(agent), store=store):
            await runner.iter()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())

    async def look():
        (found,) = await store.query_rollouts()
        return await latest(store, found.rollout_id)

    attempt = asyncio.run(look())
    assert (attempt.status, attempt.failure_kind) == ("unresponsive", FailureKind.INFRA_ERROR)


# step.


async def test_step_returns_the_rollout_as_the_store_has_it(store, start_runner):
    finished = await start_runner(async_agent).step(3, resources=RESOURCES, mode="val")
    assert (finished.status, finished.mode, finished.input) == ("succeeded", "val", 3)
    assert finished.attempt.worker_id == "Worker-0"
    assert finished.resources_id == (await store.get_latest_resources()).resources_id


async def test_step_raises_what_the_agent_raised(store, start_runner):
    error = KeyError("tool")

    async def agent(task, llm):
        raise error

    with pytest.raises(KeyError) as raised:
        await start_runner(agent).step(1, resources=RESOURCES)
    assert raised.value is error
    (found,) = await store.query_rollouts()
    assert found.status == "failed"


async def test_step_without_resources_is_an_error_that_the_store_has_too(store, start_runner):
    with pytest.raises(RuntimeError, match="the store has no resources yet"):
        await start_runner(async_agent).step(1)
    (found,) = await store.query_rollouts()
    assert found.status == "failed"


async def test_step_is_cancelled_by_its_event(store, start_runner):
    event, entered = threading.Event(), asyncio.Event()

    async def agent(task, llm):
        entered.set()
        await asyncio.sleep(60)

    work = asyncio.create_task(start_runner(agent).step(1, resources=RESOURCES, event=event))
    await entered.wait()
    event.set()
    assert (await asyncio.wait_for(work, 5)).status == "cancelled"


async def test_step_says_where_its_rollout_is_lost(store, start_runner, monkeypatch):
    async def nothing(rollout_id):
        return None

    monkeypatch.setattr(store, "get_rollout_by_id", nothing)
    with pytest.raises(RuntimeError, match="Failed to fetch completed rollout"):
        await start_runner(async_agent).step(1, resources=RESOURCES)


@pytest.mark.parametrize(
    ("mode", "ran"), [("train", 1.0), ("val", 2.0), ("test", 2.0), (None, 2.0)]
)
async def test_the_mode_chooses_the_method(store, start_runner, mode, ran):
    class Agent(LitAgent[Any]):
        async def training_rollout_async(self, task, resources, rollout):
            return 1.0

        async def validation_rollout_async(self, task, resources, rollout):
            return 2.0

    finished = await start_runner(Agent()).step(1, resources=RESOURCES, mode=mode)
    assert find_final_reward(await store.query_spans(finished.rollout_id)) == ran


async def test_an_agent_knows_its_runner_and_tracer(store, start_runner):
    class Agent(LitAgent[Any]):
        def rollout(self, task, resources, rollout):
            return float(self.runner is not None and self.tracer is self.runner.tracer)

    finished = await start_runner(Agent()).step(1, resources=RESOURCES)
    assert find_final_reward(await store.query_spans(finished.rollout_id)) == 1.0


# iter.


async def test_concurrent_rollouts_never_mix_spans(store, start_runner):
    at_once = [0, 0]

    async def agent(task, llm):
        at_once[0] += 1
        at_once[1] = max(at_once)
        for step in range(5):
            await asyncio.sleep(0.01 * (task % 3))
            emit_annotation({"task": task, "step": step})
        at_once[0] -= 1
        return float(task)

    attempts = await run_queue(store, start_runner, agent, *range(24), concurrency=8)
    assert at_once[1] == 8
    for task, attempt in enumerate(attempts):
        spans = await store.query_spans(attempt.rollout_id)
        notes = [s.attributes["task"] for s in spans if "task" in s.attributes]
        assert notes == [task] * 5
        assert find_final_reward(spans) == task
        assert len({s.trace_id for s in spans}) == 1
        assert len({s.sequence_id for s in spans}) == len(spans) == 7


async def test_sync_agents_run_at_once_in_threads(store, start_runner):
    barrier = threading.Barrier(4, timeout=10)

    def agent(task, llm):
        barrier.wait()
        emit_annotation({"task": task})
        return float(task)

    attempts = await run_queue(store, start_runner, agent, *range(4), concurrency=4)
    for task, attempt in enumerate(attempts):
        spans = await store.query_spans(attempt.rollout_id)
        assert [s.attributes["task"] for s in spans if "task" in s.attributes] == [task]


async def test_an_empty_queue_is_waited_for_until_the_event(store, start_runner):
    event = threading.Event()
    await store.add_resources(RESOURCES)
    work = asyncio.create_task(start_runner(async_agent, poll_interval=30.0).iter(event=event))
    await asyncio.sleep(0.3)
    assert not work.done()
    event.set()
    await asyncio.wait_for(work, 15)  # half of its interval


async def test_the_event_lets_rollouts_under_way_finish(store, start_runner):
    event, entered = threading.Event(), asyncio.Event()

    async def agent(task, llm):
        entered.set()
        await asyncio.sleep(0.3)
        return 1.0

    await store.add_resources(RESOURCES)
    first, second = await store.enqueue_rollout(1), await store.enqueue_rollout(2)
    work = asyncio.create_task(start_runner(agent).iter(event=event))
    await entered.wait()
    event.set()
    await asyncio.wait_for(work, 5)
    assert (await store.get_rollout_by_id(first.rollout_id)).status == "succeeded"
    assert (await store.get_rollout_by_id(second.rollout_id)).status == "queuing"


async def test_a_store_that_is_away_is_asked_again_with_the_same_key(
    store, start_runner, monkeypatch
):
    keys, dequeue = [], store.dequeue_rollout

    async def flaky(worker_id, *, idempotency_key):
        keys.append(idempotency_key)
        taken = await dequeue(worker_id, idempotency_key=idempotency_key)
        if len(keys) == 1:
            raise TransientError("the answer was lost")
        return taken

    monkeypatch.setattr(store, "dequeue_rollout", flaky)
    (attempt,) = await run_queue(store, start_runner, async_agent, 1)
    assert (attempt.sequence_id, attempt.status) == (1, "succeeded")
    assert keys[0] == keys[1]


async def test_a_store_that_gives_no_rollouts_ends_the_runner_and_what_it_runs(
    store, start_runner, monkeypatch
):
    dequeue = store.dequeue_rollout
    entered = asyncio.Event()

    async def agent(task, llm):
        entered.set()
        await asyncio.sleep(60)

    async def refuses(worker_id, *, idempotency_key):
        if entered.is_set():
            raise StoreError("no such worker")
        return await dequeue(worker_id, idempotency_key=idempotency_key)

    monkeypatch.setattr(store, "dequeue_rollout", refuses)
    await store.add_resources(RESOURCES)
    queued = await store.enqueue_rollout("t")
    with pytest.raises(StoreError, match="no such worker"):
        await asyncio.wait_for(start_runner(agent, concurrency=2).iter(), 10)
    assert (await latest(store, queued.rollout_id)).status == "unresponsive"


async def test_an_end_that_cannot_be_recorded_does_not_end_the_runner(
    store, start_runner, monkeypatch, caplog
):
    update, failures = store.update_attempt, [TransientError("away")]

    async def flaky(*ids, **fields):
        if failures:
            raise failures.pop()
        return await update(*ids, **fields)

    monkeypatch.setattr(store, "update_attempt", flaky)
    first, second = await run_queue(store, start_runner, async_agent, 1, 2)
    assert (first.status, second.status) == ("running", "succeeded")
    assert "could not be recorded" in caplog.text


# Setting up.


def test_a_runner_that_is_not_set_up_says_what_is_missing():
    runner = LitAgentRunner[Any](DummyTracer())
    for getter, words in (
        (runner.get_agent, r"init\(agent\)"),
        (runner.get_store, "init_worker"),
        (runner.get_worker_id, "init_worker"),
    ):
        with pytest.raises(ValueError, match=words):
            getter()
    with pytest.raises(RuntimeError, match=r"Use iter\(\) or step\(\)"):
        runner.run()


@pytest.mark.parametrize(
    "setting",
    [
        {"max_rollouts": -1},
        {"poll_interval": -1.0},
        {"interval_jitter": -0.1},
        {"heartbeat_launch_mode": "process"},
        {"concurrency": 0},
        {"max_leaked_threads": -1},
    ],
)
def test_a_setting_out_of_its_range_is_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        LitAgentRunner(DummyTracer(), **setting)


def test_gpus_without_nvidia_smi_are_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="nvidia-smi"):
        LitAgentRunner(DummyTracer(), heartbeat_include_gpu=True)


def test_what_is_no_agent_or_unknown_is_refused():
    runner = LitAgentRunner[Any](DummyTracer())
    with pytest.raises(TypeError, match="decorated with @rollout"):
        runner.init(lambda task, llm: 1.0)
    with pytest.raises(TypeError, match="unknown arguments: colour"):
        runner.init(Echo(), colour="red")
    with pytest.raises(TypeError, match="unknown arguments: colour"):
        runner.init_worker(0, InMemoryLightningStore(), colour="red")


async def test_run_context_honours_the_number_of_the_worker(store, start_runner):
    runner = start_runner(async_agent, worker_id=7)
    assert runner.get_worker_id() == "Worker-7"
    finished = await runner.step(1, resources=RESOURCES)
    assert finished.attempt.worker_id == "Worker-7"


def test_an_error_of_a_teardown_is_logged(caplog):
    runner = LitAgentRunner[Any](DummyTracer())

    def broken(worker_id):
        raise OSError("busy")

    runner.tracer.teardown_worker = broken
    with runner.run_context(agent=Echo(), store=InMemoryLightningStore()):
        pass
    assert "OSError: busy" in caplog.text
    with pytest.raises(ValueError, match="no agent"):
        runner.get_agent()


def test_a_runner_travels_to_another_process_before_it_is_set_up():
    runner = LitAgentRunner[Any](OtelTracer(), concurrency=3)
    runner.leaks.total = 5
    copy = pickle.loads(pickle.dumps(runner))
    assert (copy.concurrency, copy.leaks.total) == (3, 0)
