"""Processes that agents start: real ones, in this process's event loop and threads."""

import asyncio
import os
import subprocess
import sys
from asyncio.subprocess import Process
from subprocess import PIPE
from typing import Any

import pytest

from agl_core.emitter import emit_reward
from agl_core.litagent.decorator import as_agent
from agl_core.runner.children import AttemptOver, attempt_children, kill_trees
from agl_core.runner.rollout import Ending, run_attempt
from agl_core.tracer.otel import OtelTracer
from agl_core.types.core import Attempt, AttemptedRollout
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import LLM
from tests.agl_core.runner.test_agent_pool import is_alive, wait_until_gone

TREE = ["sh", "-c", "sleep 300 & echo $!; wait"]
"""A process with a child of its own, whose id it prints."""


async def run(agent: Any, timeout_seconds: float = 60.0) -> Ending:
    attempt = Attempt(
        rollout_id="ro", attempt_id="at", sequence_id=1, start_time=0.0, status="running"
    )
    rollout = AttemptedRollout(
        rollout_id="ro", input={}, start_time=0.0, status="running", attempt=attempt
    )
    llm = LLM(endpoint="http://127.0.0.1:9/v1", model="m")
    result = await run_attempt(
        as_agent(agent),
        rollout,
        resources={"llm": llm},
        tracer=OtelTracer(),
        timeout_seconds=timeout_seconds,
    )
    return result.ending


async def closed(*processes: Process) -> None:
    """Let the event loop see that processes ended, while it runs."""
    for process in processes:
        await asyncio.wait_for(process.wait(), timeout=10)


@pytest.mark.parametrize("has_group", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_an_agent_started_ends_at_its_deadline(is_async: bool, has_group: bool):
    children: list[int] = []
    processes: list[Process] = []

    def waits(task: Any, llm: Any) -> None:
        with subprocess.Popen(TREE, stdout=PIPE, start_new_session=has_group) as process:
            assert process.stdout is not None
            children.extend([process.pid, int(process.stdout.readline())])

    async def waits_in_the_loop(task: Any, llm: Any) -> None:
        process = await asyncio.create_subprocess_exec(
            *TREE, stdout=PIPE, start_new_session=has_group
        )
        processes.append(process)
        assert process.stdout is not None
        children.extend([process.pid, int(await process.stdout.readline())])
        await process.wait()

    ending = await run(waits_in_the_loop if is_async else waits, timeout_seconds=2.0)
    assert ending.kind is FailureKind.TIMEOUT
    assert len(children) == 2
    wait_until_gone(*children)
    await closed(*processes)


async def test_a_cancelled_attempt_takes_its_processes_along():
    started = asyncio.Event()
    processes: list[Process] = []

    async def agent(task: Any, llm: Any) -> None:
        process = await asyncio.create_subprocess_exec("sleep", "300")
        processes.append(process)
        started.set()
        await process.wait()

    attempt = asyncio.create_task(run(agent))
    await started.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    wait_until_gone(*(process.pid for process in processes))
    await closed(*processes)


async def test_a_process_left_running_on_return_serves_later_attempts():
    processes: list[Process] = []

    async def agent(task: Any, llm: Any) -> float:
        processes.append(await asyncio.create_subprocess_exec("sleep", "300"))
        return 1.0

    assert (await run(agent)).reward == 1.0
    (process,) = processes
    assert is_alive(process.pid)
    kill_trees([process.pid])
    wait_until_gone(process.pid)
    await closed(process)


def test_a_process_left_running_ends_with_this_process():
    script = """
import asyncio, subprocess
from tests.agl_core.runner.test_children import TREE, run

def agent(task, llm):
    process = subprocess.Popen(TREE, stdout=subprocess.PIPE)
    print(process.pid, int(process.stdout.readline()), flush=True)

assert asyncio.run(run(agent)).message == ""
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    pids = [float(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until_gone(*pids)


async def test_an_agent_cannot_emit_in_a_process_that_it_forked():
    def agent(task: Any, llm: Any) -> float:
        if (pid := os.fork()) == 0:
            try:
                emit_reward(1.0)
            except RuntimeError as error:
                os._exit(7 if "emit it in the agent's own" in str(error) else 8)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert (await run(agent)).reward == 7.0


def test_a_process_ends_without_waiting_for_those_of_multiprocessing():
    script = """
import asyncio, multiprocessing, time
from tests.agl_core.runner.test_children import run

def agent(task, llm):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    process.start()
    print(process.pid, flush=True)

assert asyncio.run(run(agent)).message == ""
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    wait_until_gone(float(done.stdout))


def test_an_attempt_that_is_over_starts_no_more_processes():
    with attempt_children() as children:
        children.give_up()
        with pytest.raises(AttemptOver):
            subprocess.run(["true"], check=True)
    subprocess.run(["true"], check=True)
