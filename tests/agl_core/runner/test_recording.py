"""Runners that record their agents' calls by a proxy of their own."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import openai
import pytest

from agl_core import semconv
from agl_core.adapter import TracerTraceToTriplet
from agl_core.errors import ConfigError
from agl_core.litagent import llm_rollout
from agl_core.llm_proxy import LLMProxy
from agl_core.llm_proxy.backends import Backend
from agl_core.llm_proxy.capture import call_seed
from agl_core.llm_proxy.store_calls import SEED
from agl_core.runner.recording import RecordingProxies
from agl_core.store import InMemoryLightningStore
from agl_core.tracer import AgentOpsTracer, OtelTracer
from agl_core.types.core import AttemptedRollout
from agl_core.types.resources import LLM, ProxyLLM, RecordedLLM
from agl_core.types.training import PolicyRef
from tests.agl_core.llm_proxy.test_proxy import entry
from tests.agl_core.runner.conftest import StartRunner
from tests.fakes import ScriptedModelServer, decode_chars, encode_chars

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT_IDS = encode_chars("user: hi\nassistant: ")


async def ask(task: object, llm: LLM) -> float:
    async with openai.AsyncOpenAI(
        base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0
    ) as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": str(task)}]
        )
    assert getattr(answer, "prompt_token_ids", None) is None, "the agent did not ask for ids"
    return float(len(answer.choices[0].message.content or ""))


def proxy_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("server-")}


async def calls_of(store, rollout):
    spans = await store.query_spans(rollout.rollout_id, "latest")
    return [span for span in spans if span.name == semconv.LLM_CALL_SPAN]


@pytest.mark.parametrize("tracer", [OtelTracer, AgentOpsTracer])
async def test_calls_are_recorded_once_with_ids_and_sampling_parameters(
    store, start_runner: StartRunner, tracer
):
    with ScriptedModelServer() as server:
        llm = RecordedLLM(
            endpoint=server.base_url,
            model="policy",
            upstream_model=server.model,
            sampling_parameters={"temperature": 0.7},
        )
        rollout = await start_runner(ask, tracer=tracer()).step("hi", resources={"main": llm})
        (sent,) = server.requests
        assert (sent["model"], sent["temperature"]) == (server.model, 0.7)
        assert sent["seed"] == call_seed(rollout.rollout_id, 0)
    assert rollout.status == "succeeded"
    (call,) = await calls_of(store, rollout)
    assert list(call.attributes[semconv.PROMPT_TOKEN_IDS]) == PROMPT_IDS
    ids = list(call.attributes[semconv.RESPONSE_TOKEN_IDS])
    assert decode_chars(ids) == server.reply(sent["messages"], sent["seed"])
    spans = await store.query_spans(rollout.rollout_id, "latest")
    (triplet,) = TracerTraceToTriplet().adapt(spans)
    assert (triplet.reward, list(triplet.response["token_ids"])) == (8.0, ids)


async def ask_by_headers(task: object, llm: ProxyLLM, rollout: AttemptedRollout) -> float:
    headers = {"x-rollout-id": rollout.rollout_id, "x-attempt-id": rollout.attempt.attempt_id}
    async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key="x") as client:
        await client.chat.completions.create(
            model=llm.model, messages=MESSAGES, extra_headers=headers
        )
    return 1.0


async def test_calls_that_headers_attribute_are_recorded_once_too(store, start_runner: StartRunner):
    agent = llm_rollout(strip_proxy=False)(ask_by_headers)
    with ScriptedModelServer() as server:
        llm = RecordedLLM(endpoint=server.base_url, model=server.model)
        rollout = await start_runner(agent, tracer=AgentOpsTracer()).step(
            "hi", resources={"main": llm}
        )
        assert server.requests[0]["seed"] == call_seed(rollout.rollout_id, 0)
    (call,) = await calls_of(store, rollout)
    assert list(call.attributes[semconv.PROMPT_TOKEN_IDS]) == PROMPT_IDS


async def test_calls_are_seeded_by_the_metadata_of_their_rollout(store, start_runner: StartRunner):
    runner = start_runner(ask, max_rollouts=2)
    with ScriptedModelServer() as server:
        llm = RecordedLLM(endpoint=server.base_url, model=server.model)
        update = await store.add_resources({"main": llm})
        for seed in (7, 8):
            await store.enqueue_rollout(
                "hi", resources_id=update.resources_id, metadata={SEED: seed}
            )
        async with asyncio.timeout(20):
            await runner.iter()
        seeds = {request["seed"] for request in server.requests}
    assert seeds == {call_seed(7, 0), call_seed(8, 0)}


async def test_attempts_of_one_rollout_side_by_side_have_one_seed():
    tracer = OtelTracer()
    proxies = RecordingProxies(tracer)
    store = InMemoryLightningStore()
    first = await store.start_rollout("hi", metadata={SEED: 7})
    second = first.model_copy(
        update={"attempt": first.attempt.model_copy(update={"attempt_id": "at-2"})}
    )
    with ScriptedModelServer() as server:
        llm = {"main": RecordedLLM(endpoint=server.base_url, model=server.model)}
        async with AsyncExitStack() as both:
            await both.enter_async_context(proxies.opened(second, llm))
            async with proxies.opened(first, llm):
                pass
            (proxy,) = proxies._open.values()
            assert proxy.seeds == {first.rollout_id: 7}, "the second one still runs"
        assert proxy.seeds == {}
        proxies.close()
    await store.close()


async def test_resources_that_are_alike_share_a_proxy(start_runner: StartRunner):
    with ScriptedModelServer() as server:
        llm = RecordedLLM(endpoint=server.base_url, model=server.model)
        known = proxy_threads()
        rollout = await start_runner(ask).step("hi", resources={"main": llm, "judge": llm})
        assert rollout.status == "succeeded"
        assert len(proxy_threads() - known) == 1


def test_threads_that_need_a_proxy_at_once_share_one():
    with ScriptedModelServer() as server:
        llm = RecordedLLM(endpoint=server.base_url, model=server.model)
        proxies = RecordingProxies(OtelTracer())
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: proxies._proxy_of(llm), range(4)))
        assert len({id(proxy) for proxy in found}) == 1
        proxies.close()


async def test_rollouts_side_by_side_share_a_proxy_which_ends_with_the_worker(
    store, start_runner: StartRunner
):
    before = proxy_threads()
    runner = start_runner(ask, concurrency=8, max_rollouts=24)
    with ScriptedModelServer() as server:
        known = proxy_threads()
        llm = RecordedLLM(endpoint=server.base_url, model=server.model)
        update = await store.add_resources({"main": llm})
        ids = [
            (await store.enqueue_rollout(f"{i}", resources_id=update.resources_id)).rollout_id
            for i in range(24)
        ]
        async with asyncio.timeout(60):
            await runner.iter()
        assert len(proxy_threads() - known) == 1
        found = await store.query_rollouts(rollout_id_in=ids)
        for rollout in found:
            (call,) = await calls_of(store, rollout)
            (message,) = json.loads(call.attributes[semconv.INPUT_MESSAGES])
            assert str(rollout.input) in json.dumps(message), "another rollout's call"
        runner.teardown_worker(0)
        assert proxy_threads() == known
        runner.init_worker(0, store)  # what the fixture undoes
    assert proxy_threads() == before


async def test_only_the_latest_idle_proxies_are_kept(start_runner: StartRunner):
    runner = start_runner(ask)
    with ScriptedModelServer() as server:
        known = proxy_threads()
        for number in range(8):
            parameters = {"max_tokens": 10 + number}
            llm = RecordedLLM(
                endpoint=server.base_url, model=server.model, sampling_parameters=parameters
            )
            await runner.step("hi", resources={"main": llm})
        assert len(proxy_threads() - known) <= 5
        assert [request["max_tokens"] for request in server.requests] == list(range(10, 18))


async def test_answer_of_other_weights_fails_the_attempt_with_that_reason(
    store, start_runner: StartRunner
):
    with ScriptedModelServer() as server:
        llm = RecordedLLM(endpoint=server.base_url, model="v000000", weights_digest="1" * 64)
        with pytest.raises(openai.InternalServerError, match="does another run use the server"):
            await start_runner(ask).step("hi", resources={"main": llm})
    (rollout,) = await store.query_rollouts()
    assert rollout.status == "failed"
    (call,) = await calls_of(store, rollout)
    assert "does another run use" in (call.status.description or "")


async def test_key_of_the_run_s_engine_comes_from_the_runner_s_environment(
    start_runner: StartRunner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGL_ENGINE_TOKEN", "secret-of-the-engine")
    with ScriptedModelServer() as server:
        runner = start_runner(ask)
        own = RecordedLLM(endpoint=server.base_url, model="v000000", weights_digest="0" * 64)
        other = RecordedLLM(endpoint=server.base_url, model=server.model)
        for llm in (own, other):
            await runner.step("hi", resources={"main": llm})
        assert [headers.get("authorization") for headers in server.headers] == [
            "Bearer secret-of-the-engine",
            None,
        ]


async def test_a_proxy_of_runners_listens_nowhere_and_tells_them_the_servers():
    with ScriptedModelServer() as first, ScriptedModelServer() as second:
        models = [entry(first.base_url), entry(second.base_url)]
        proxy = LLMProxy(model_list=models, launch_mode="runner", num_retries=2)
        with pytest.raises(RuntimeError, match="call start"):
            proxy.as_resource()
        known = proxy_threads()
        await proxy.start()
        assert proxy.is_running()
        llm = proxy.as_resource(sampling_parameters={"top_p": 0.5})
        assert llm == RecordedLLM(
            endpoint=first.base_url,
            further_endpoints=(second.base_url,),
            model="m",
            upstream_model="served",
            sampling_parameters={"top_p": 0.5},
            max_tries=3,
        )
        with pytest.raises(ConfigError, match="no address before it runs"):
            proxy.as_resource("ro", "at")
        policy = PolicyRef(version="v000001", weights_digest="2" * 64)
        backends = [Backend(server.base_url, "secret") for server in (first, second)]
        async with proxy.serving(backends, policy, {}, 5.0) as given:
            assert given == RecordedLLM(
                endpoint=first.base_url,
                further_endpoints=(second.base_url,),
                model="v000001",
                weights_digest="2" * 64,
                deadline_seconds=5.0,
            )
        await proxy.flush()
        assert proxy_threads() == known
        await proxy.stop()
        assert not proxy.is_running()


@pytest.mark.parametrize("wrong", [{"port": 4000}, {"host": "0.0.0.0"}, {"token": "x"}])
def test_an_address_of_a_proxy_of_runners_is_refused(wrong):
    with pytest.raises(ConfigError, match="leave out host, port and token"):
        LLMProxy(launch_mode="runner", **wrong)


async def test_servers_with_several_keys_cannot_be_told_as_one_resource():
    models = [entry("http://a/v1", api_key="x"), entry("http://b/v1", api_key="y")]
    proxy = LLMProxy(model_list=models, launch_mode="runner")
    await proxy.start()
    with pytest.raises(ConfigError, match="one api_key"):
        proxy.as_resource()


def test_an_agent_outside_of_a_runner_is_told_that_nothing_records_it():
    llm = RecordedLLM(endpoint="http://127.0.0.1:1/v1", model="m")
    assert not isinstance(llm, ProxyLLM)
    with pytest.raises(RuntimeError, match="opened by a LitAgentRunner"):
        llm.get_base_url("ro", "at")
