import asyncio
import json
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from agl_core import semconv
from agl_core.emitter import emit_reward, find_final_reward
from agl_core.errors import ConfigError
from agl_core.litagent import as_agent
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.llm_proxy.capture import call_seed
from agl_core.runner import (
    JudgedAttempt,
    LeakCounter,
    judge_attempt,
    make_attempt_id,
    run_attempt,
)
from agl_core.tracer import OtelTracer
from agl_core.types.core import Attempt, AttemptedRollout, RolloutMode
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import LLM, ProxyLLM
from tests.fakes import ScriptedModelServer, scripted_reply


@dataclass
class Bench:
    """What a shard owns: tracer, proxy, threads; and a scripted backend."""

    server: ScriptedModelServer
    tracer: OtelTracer
    llm: ProxyLLM
    leaks: LeakCounter

    async def run(
        self,
        agent: Any,
        task: Any = "hi",
        *,
        index: int = 0,
        rollout_id: str = "ro-1",
        attempt: int = 1,
        mode: RolloutMode = "train",
        timeout_seconds: float = 10.0,
    ) -> JudgedAttempt:
        rollout = AttemptedRollout(
            rollout_id=rollout_id,
            input=task,
            start_time=0.0,
            mode=mode,
            attempt=Attempt(
                rollout_id=rollout_id,
                attempt_id=make_attempt_id(rollout_id, attempt),
                sequence_id=attempt,
                start_time=0.0,
            ),
        )
        result = await run_attempt(
            as_agent(agent),
            rollout,
            resources={"main_llm": self.llm},
            tracer=self.tracer,
            timeout_seconds=timeout_seconds,
            leaks=self.leaks,
        )
        return judge_attempt(result, index)


@pytest.fixture
def bench():
    tracer = OtelTracer()
    with (
        ScriptedModelServer() as server,
        ProxyServer(ProxyConfig(backend_url=server.base_url, max_tries=2), tracer) as proxy,
    ):
        yield Bench(server, tracer, proxy.as_resource("m"), LeakCounter())


def messages_of(task: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": str(task)}]


async def ask(llm: LLM, task: Any) -> str:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.create(model=llm.model, messages=messages_of(task))
    return answer.choices[0].message.content


def ask_sync(llm: LLM, task: Any) -> str:
    with openai.OpenAI(base_url=llm.endpoint, api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(model=llm.model, messages=messages_of(task))
    return answer.choices[0].message.content


async def two_calls(task, llm):
    await ask(llm, f"{task}-0")
    await ask(llm, f"{task}-1")
    return float(task)


def two_calls_sync(task, llm):
    ask_sync(llm, f"{task}-0")
    ask_sync(llm, f"{task}-1")
    return float(task)


async def test_success_has_outcome_and_spans(bench):
    outcome, spans = (result := await bench.run(two_calls, 3, index=7)).outcome, result.spans
    assert (outcome.kind, outcome.reward) == (FailureKind.SUCCEEDED, 3.0)
    assert (outcome.index, outcome.attempt, outcome.num_calls) == (7, 1, 2)
    assert outcome.attempt_id == make_attempt_id("ro-1", 1)
    assert outcome.prompt_tokens == 2 * len("user: 3-0\nassistant: ")
    assert outcome.completion_tokens == 16
    assert (outcome.message, outcome.traceback) == ("", "")
    names = [semconv.LLM_CALL_SPAN] * 2 + [semconv.ANNOTATION_SPAN, semconv.ROLLOUT_SPAN]
    assert [span.name for span in spans] == names
    assert find_final_reward(spans) == 3.0
    assert spans[-1].status.is_ok


@pytest.mark.parametrize("agent", [two_calls, two_calls_sync])
async def test_concurrent_attempts_get_their_own_spans_and_replies(bench, agent):
    async with asyncio.TaskGroup() as group:
        runs = [
            group.create_task(bench.run(agent, n, index=n, rollout_id=f"ro-{n}")) for n in range(16)
        ]
    for number, run in enumerate(runs):
        result = run.result()
        assert result.outcome.kind is FailureKind.SUCCEEDED
        assert result.outcome.reward == number
        calls = [s for s in result.spans if s.name == semconv.LLM_CALL_SPAN]
        for index, call in enumerate(calls):
            assert call.attributes[semconv.ROLLOUT_ID] == f"ro-{number}"
            messages = messages_of(f"{number}-{index}")
            text = scripted_reply(messages, call_seed(f"ro-{number}", index))
            assert f'"content":"{text}"' in call.attributes[semconv.OUTPUT_MESSAGES]
    assert bench.tracer.late_spans == 0


async def test_next_attempt_gets_the_same_replies(bench):
    first, second = await bench.run(two_calls, 1), await bench.run(two_calls, 1, attempt=2)
    assert first.outcome.attempt_id != second.outcome.attempt_id
    ids = [
        [s.attributes.get(semconv.RESPONSE_TOKEN_IDS) for s in result.spans]
        for result in (first, second)
    ]
    assert ids[0] == ids[1]


async def test_agent_may_take_the_rollout(bench):
    async def agent(task, llm, rollout):
        await ask(llm, task)
        return float(rollout.mode == "val" and rollout.attempt.sequence_id == 2)

    assert (await bench.run(agent, attempt=2, mode="val")).outcome.reward == 1.0


async def test_emitted_reward_counts_where_none_is_returned(bench):
    def agent(task, llm):
        ask_sync(llm, task)
        emit_reward(0.25)
        emit_reward({"style": 0.0, "exact": 0.5}, primary_key="exact")

    assert (await bench.run(agent)).outcome.reward == 0.5


@pytest.mark.parametrize(("returned", "reward"), [(1, 1.0), (True, 1.0), (0.75, 0.75)])
async def test_returned_reward_wins_and_both_are_kept(bench, returned, reward):
    async def agent(task, llm):
        await ask(llm, task)
        emit_reward(0.25)
        return returned

    result = await bench.run(agent)
    assert result.outcome.reward == reward
    rewards = [(s.attributes or {}).get(semconv.PRIMARY_REWARD_VALUE) for s in result.spans]
    assert [r for r in rewards if r is not None] == [0.25, reward]


async def test_exception_is_an_agent_error_with_its_traceback(bench):
    async def agent(task, llm):
        await ask(llm, task)
        raise KeyError("no such\ntool")

    result = await bench.run(agent)
    assert result.outcome.kind is FailureKind.AGENT_ERROR
    assert result.outcome.message.startswith(r"KeyError: 'no such\ntool' (tests/")
    assert "in agent" in result.outcome.traceback
    assert result.outcome.reward is None
    assert result.outcome.num_calls == 1
    assert result.spans[-1].status.description == "agent_error"


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


def forgot_async(task, llm):
    return ask(llm, task)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (lambda task, llm: "1.0", "must return a number or None"),
        (lambda task, llm: float("nan"), "must be finite"),
        (lambda task, llm: Unreadable(), "cannot be shown"),
        (forgot_async, "a coroutine without being an async function"),
    ],
)
async def test_wrong_return_value_is_an_agent_error(bench, agent, words):
    outcome = (await bench.run(agent)).outcome
    assert outcome.kind is FailureKind.AGENT_ERROR
    assert words in outcome.message


async def test_returned_spans_are_an_agent_error_of_the_pipeline(bench):
    async def agent(task, llm):
        await ask(llm, task)
        return [emit_reward(1.0, propagate=False)]

    outcome = (await bench.run(agent)).outcome
    assert (outcome.kind, outcome.reward) == (FailureKind.AGENT_ERROR, None)
    assert "the agent returned spans" in outcome.message


async def test_slow_async_agent_times_out(bench):
    async def agent(task, llm):
        await ask(llm, task)
        await asyncio.sleep(30)

    outcome = (await bench.run(agent, timeout_seconds=1.5)).outcome
    assert outcome.kind is FailureKind.TIMEOUT
    assert outcome.message == "the agent did not return within 1.5 s"
    assert outcome.num_calls == 1
    assert outcome.duration_seconds < 10.0
    assert bench.leaks.total == 0


async def test_agent_that_swallows_cancellation_does_not_hang_us(bench):
    release = asyncio.Event()

    async def agent(task, llm):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    outcome = (await bench.run(agent, timeout_seconds=0.1)).outcome
    assert outcome.kind is FailureKind.TIMEOUT
    assert bench.leaks.tasks == 1
    release.set()
    await asyncio.sleep(0.05)
    assert bench.leaks.tasks == 0


async def test_slow_sync_agent_times_out_and_its_late_call_is_refused(bench):
    release, refused = threading.Event(), []

    def agent(task, llm):
        release.wait(5.0)
        try:
            ask_sync(llm, task)
        except openai.NotFoundError as error:
            refused.append(str(error))

    started = time.monotonic()
    outcome = (await bench.run(agent, timeout_seconds=0.1)).outcome
    assert outcome.kind is FailureKind.TIMEOUT
    assert time.monotonic() - started < 4.0
    assert bench.leaks.threads == 1
    release.set()
    async with asyncio.timeout(5.0):
        while bench.leaks.threads:  # noqa: ASYNC110 - a counter, not an event
            await asyncio.sleep(0.01)
    assert "is not running here" in refused[0]
    assert bench.server.num_calls == 0


@pytest.mark.parametrize("agent", [two_calls, two_calls_sync])
async def test_failing_model_server_is_an_infra_error(bench, agent):
    bench.server.fail_next(2, 500)
    outcome = (await bench.run(agent, 1)).outcome
    assert outcome.kind is FailureKind.INFRA_ERROR
    assert "scripted failure 500" in outcome.message


async def test_model_server_that_is_gone_is_an_infra_error(bench):
    bench.server.__exit__()
    outcome = (await bench.run(two_calls, 1)).outcome
    assert outcome.kind is FailureKind.INFRA_ERROR
    assert "cannot reach the model server" in outcome.message


async def test_bad_request_is_an_agent_error(bench):
    bench.server.fail_next(1, 400)
    assert (await bench.run(two_calls, 1)).outcome.kind is FailureKind.AGENT_ERROR


async def test_reward_without_a_call_is_no_trace(bench):
    outcome = (await bench.run(lambda task, llm: 1.0)).outcome
    assert outcome.kind is FailureKind.NO_TRACE
    assert "no model call was recorded" in outcome.message
    assert outcome.reward is None, "what the agent gave is in its spans"


async def test_calls_without_token_ids_are_no_trace(bench):
    bench.server.token_ids = False
    outcome = (await bench.run(two_calls, 1)).outcome
    assert outcome.kind is FailureKind.NO_TRACE
    assert outcome.message == ("2 model calls, none with token ids: no token ids in the answer")
    assert outcome.num_calls == 2


async def test_no_reward_is_said(bench):
    async def agent(task, llm):
        await ask(llm, task)

    outcome = (await bench.run(agent)).outcome
    assert outcome.kind is FailureKind.NO_REWARD
    assert outcome.reward is None


async def test_cancellation_goes_on_and_closes_the_attempt(bench):
    entered = asyncio.Event()

    async def agent(task, llm):
        entered.set()
        await asyncio.sleep(30)

    run = asyncio.create_task(bench.run(agent))
    await entered.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert bench.tracer.find_open("ro-1", make_attempt_id("ro-1", 1)) is None


async def test_a_cancellation_of_the_agents_own_is_its_error(bench):
    def in_a_thread(task, llm):
        raise asyncio.CancelledError

    async def in_the_loop(task, llm):
        raise asyncio.CancelledError

    for agent in (in_a_thread, in_the_loop):
        outcome = (await bench.run(agent)).outcome
        assert outcome.kind is FailureKind.AGENT_ERROR
        assert outcome.message.startswith("CancelledError (tests/")
        assert outcome.message.endswith(f" in {agent.__name__})")


async def test_an_error_that_utf8_cannot_hold_can_be_written(bench):
    def agent(task, llm):
        raise ValueError("bad file name \udcff")

    outcome = (await bench.run(agent)).outcome
    assert outcome.message.startswith("ValueError: bad file name \\udcff (tests/")
    assert outcome.traceback.encode()


async def test_missing_resource_is_a_config_error(bench):
    with pytest.raises(ConfigError, match="takes prompt_template"):
        await bench.run(lambda task, prompt_template: 1.0)


def test_attempt_id_is_stable():
    assert make_attempt_id("ro-1", 1) == make_attempt_id("ro-1", 1)
    assert make_attempt_id("ro-1", 1) != make_attempt_id("ro-1", 2)
    assert len(make_attempt_id("ro-1", 1)) == len("at-") + 8


async def test_a_bad_return_value_names_the_agents_function(bench):
    async def agent(task, llm):
        await ask(llm, task)
        return (1.0, {"steps": 3})

    outcome = (await bench.run(agent)).outcome
    line = agent.__code__.co_firstlineno
    assert outcome.message.endswith(f"(tests/agl_core/runner/test_rollout.py:{line} in agent)")


async def test_an_error_inside_a_library_names_the_agents_own_line(bench):
    def agent(task, llm):
        return json.loads("{")

    outcome = (await bench.run(agent)).outcome
    line = agent.__code__.co_firstlineno + 1
    assert outcome.message.endswith(f"(tests/agl_core/runner/test_rollout.py:{line} in agent)")


async def test_an_agent_that_needs_the_main_thread_is_told_how_it_gets_it(bench):
    def agent(task, llm):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    outcome = (await bench.run(agent)).outcome
    assert "set rollout.isolation: process" in outcome.message
