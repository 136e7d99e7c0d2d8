import asyncio
import time
from typing import Any

import pytest

from agl_core.emitter import emit_annotation
from agl_core.litagent import LitAgent
from agl_core.types.core import Hook
from tests.agl_core.runner.conftest import RESOURCES


class Stop(BaseException):
    """Neither an error nor an exit."""


class Diary(Hook):
    """Writes down when it is called, and with what."""

    def __init__(self, name: str, log: list[tuple[str, str]], *, fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails
        self.seen: dict[str, Any] = {}

    def note(self, what: str, **seen: Any) -> None:
        self.log.append((self.name, what))
        self.seen |= seen
        if self.fails:
            raise ValueError(f"{self.name} is broken")

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        self.log.append((self.name, f"worker {worker_id}"))

    async def on_rollout_start(self, *, agent, runner, rollout):
        self.note("rollout_start", agent=agent, runner=runner, rollout=rollout)

    async def on_trace_start(self, *, agent, runner, tracer, rollout):
        emit_annotation({"hook": self.name})
        self.note("trace_start", tracer=tracer)

    async def on_trace_end(self, *, agent, runner, tracer, rollout):
        self.note("trace_end", trace=tracer.get_last_trace())

    async def on_rollout_end(self, *, agent, runner, rollout, spans):
        self.note("rollout_end", spans=spans)


ORDER = ["rollout_start", "trace_start", "agent", "trace_end", "rollout_end"]


async def test_hooks_are_called_in_order_around_the_agent(store, start_runner):
    log: list[tuple[str, str]] = []

    def agent(task, llm):
        log.append(("agent", "agent"))
        return 1.0

    first, second = Diary("first", log), Diary("second", log)
    runner = start_runner(agent, hooks=[first, second])
    finished = await runner.step(1, resources=RESOURCES)
    assert [name for name, what in log if what == "worker 0"] == ["first", "second"]
    calls = [entry for entry in log if entry[1] != "worker 0"]
    assert [what for name, what in calls if name in ("first", "agent")] == ORDER
    assert calls[:2] == [("first", "rollout_start"), ("second", "rollout_start")]
    assert first.seen["runner"] is runner
    assert first.seen["tracer"] is runner.tracer
    assert first.seen["rollout"].attempt.attempt_id == finished.attempt.attempt_id
    stored = await store.query_spans(finished.rollout_id)
    assert {s.span_id for s in first.seen["spans"]} == {s.span_id for s in stored}
    assert len(first.seen["trace"]) == len(stored) - 1  # all but the root, which ends later
    assert len(stored) == 4


async def test_an_error_of_a_hook_is_logged_and_swallowed(store, start_runner, caplog):
    broken, whole = Diary("broken", log := [], fails=True), Diary("whole", log)
    runner = start_runner(lambda task, llm: 1.0, hooks=[broken, whole])
    assert (await runner.step(1, resources=RESOURCES)).status == "succeeded"
    assert [what for name, what in log if name == "whole"][1:] == [w for w in ORDER if w != "agent"]
    assert caplog.text.count("hook failed: Diary.on_") == 4


@pytest.mark.parametrize("name", ["rollout_start", "trace_start", "trace_end", "rollout_end"])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), Stop()], ids=repr)
async def test_a_hook_ends_neither_the_attempt_nor_the_runner(store, start_runner, name, error):
    async def raises(**_: Any) -> None:
        raise error

    hook = Hook()
    setattr(hook, f"on_{name}", raises)
    runner = start_runner(lambda task, llm: 1.0, hooks=[hook])
    assert (await runner.step(1, resources=RESOURCES)).status == "succeeded"


async def test_hooks_end_also_where_the_agent_fails(store, start_runner):
    hook = Diary("hook", log := [])

    def agent(task, llm):
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await start_runner(agent, hooks=[hook]).step(1, resources=RESOURCES)
    assert [what for _, what in log][1:] == [what for what in ORDER if what != "agent"]


async def test_the_end_is_told_with_the_spans_so_far_where_the_rollout_is_cancelled(
    store, start_runner
):
    hook = Diary("hook", log := [])

    async def agent(task, llm):
        emit_annotation({"step": 1})
        (found,) = await store.query_rollouts()
        await store.update_rollout(found.rollout_id, status="cancelled")
        await asyncio.sleep(60)

    started = time.monotonic()
    finished = await start_runner(agent, hooks=[hook]).step(1, resources=RESOURCES)
    assert finished.status == "cancelled"
    assert time.monotonic() - started < 5.0
    assert log[-1] == ("hook", "rollout_end")
    assert len(hook.seen["spans"]) == 3


async def test_the_deprecated_methods_of_an_agent_are_called(store, start_runner):
    log: list[Any] = []

    class Agent(LitAgent[Any]):
        def on_rollout_start(self, task, runner, tracer):
            log.append(("start", task.input, tracer is runner.tracer))

        def on_rollout_end(self, task, rollout, runner, tracer):
            log.append(("end", rollout.rollout_id))

        def rollout(self, task, resources, rollout):
            return 1.0

    finished = await start_runner(Agent()).step(7, resources=RESOURCES)
    assert log == [("start", 7, True), ("end", finished.rollout_id)]
