"""`LLMProxy`, and calls recorded in a store."""

import asyncio

import httpx
import openai
import pytest

from agl_core import InMemoryLightningStore, LlmProxyTraceToTriplet, semconv
from agl_core.errors import ConfigError, TransientError
from agl_core.llm_proxy import Backend, LLMProxy
from agl_core.llm_proxy.capture import call_seed
from agl_core.llm_proxy.store_calls import SEED, StoreCalls
from agl_core.types.training import PolicyRef
from tests.fakes import FlakySpanStore, ScriptedModelServer, encode_chars

MESSAGES = [{"role": "user", "content": "hi"}]


def entry(url, name="m", model="hosted_vllm/served", **more):
    return {"model_name": name, "litellm_params": {"model": model, "api_base": url, **more}}


async def test_calls_of_rollouts_elsewhere_are_recorded_in_the_store():
    store = InMemoryLightningStore()
    rollout = await store.start_rollout({"question": "x"})
    with ScriptedModelServer() as server:
        proxy = LLMProxy(model_list=[entry(server.base_url)], store=store)
        assert not proxy.is_running()
        await proxy.start()
        llm = proxy.as_resource(sampling_parameters={"seed": 5}).with_attempted_rollout(rollout)
        async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key="x") as client:
            for _ in range(2):
                await client.chat.completions.create(
                    model=llm.model, messages=MESSAGES, **llm.sampling_parameters
                )
        await proxy.stop()
        assert [request["model"] for request in server.requests] == ["served", "served"]
    spans = await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)
    assert [span.name for span in spans] == [semconv.LLM_CALL_SPAN] * 2
    assert [span.attributes[semconv.CALL_INDEX] for span in spans] == [0, 1]
    assert len({span.sequence_id for span in spans}) == 2
    triplets = LlmProxyTraceToTriplet().adapt(spans)
    prompt = encode_chars("user: hi\nassistant: ")
    assert [list(triplet.prompt["token_ids"]) for triplet in triplets] == [prompt] * 2
    await store.close()


async def test_attempt_that_the_store_does_not_know_is_refused_after_its_first_call(caplog):
    store = InMemoryLightningStore()
    with ScriptedModelServer() as server:
        proxy = LLMProxy(model_list=[entry(server.base_url)], store=store)
        await proxy.start()
        url = f"{proxy.as_resource('ro-x', 'at-x').get_base_url()}/chat/completions"
        body = {"model": "m", "messages": MESSAGES}
        async with httpx.AsyncClient() as client:
            assert (await client.post(url, json=body)).status_code == 200
            for _ in range(100):
                response = await client.post(url, json=body)
                if response.status_code == 404:
                    break
                await asyncio.sleep(0.05)
        await proxy.stop()
    assert response.status_code == 404
    assert "the store refused to record a call" in response.json()["error"]["message"]
    assert "a call is lost, rollout=ro-x" in caplog.text
    await store.close()


def test_an_entry_that_is_not_whole_is_named_without_its_key():
    broken = {"model_name": "m", "litellm_params": {"model": "openai/x", "api_key": "sk-secret"}}
    with pytest.raises(ConfigError, match="model m: it needs") as caught:
        LLMProxy(model_list=[broken])
    assert "sk-secret" not in str(caught.value)


async def test_model_servers_are_replaced_while_it_runs():
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("x")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    with ScriptedModelServer() as first, ScriptedModelServer() as second:
        proxy = LLMProxy(model_list=[entry(first.base_url)], store=store)
        await proxy.start()
        url = f"{proxy.as_resource(*ids).endpoint}/chat/completions"
        body = {"model": "m", "messages": MESSAGES}
        async with httpx.AsyncClient() as client:
            unknown = await client.post(url, json={**body, "model": "other"})
            assert unknown.status_code == 404
            assert "no model server has 'other'; there are: m" in unknown.text
            await client.post(url, json=body)
            proxy.update_model_list([entry(second.base_url)])
            await client.post(url, json=body)
        await proxy.restart()
        assert proxy.is_running()
        await proxy.stop()
        assert (first.num_calls, second.num_calls) == (1, 1)
    await store.close()


URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"launcher_args": 1}, "launcher_args"),
        ({"num_workers": 4}, "num_workers=4"),
        ({"launch_mode": "x"}, "launch_mode 'x'"),
        ({"middlewares": ["rollout_attempt", "other"]}, "middlewares 'other'"),
        ({"callbacks": ["other"]}, "callbacks 'other'"),
        ({"litellm_config": {"router_settings": {}}}, "router_settings"),
        ({"litellm_config": {"litellm_settings": {"cache": True}}}, "cache"),
        ({"model_list": [{"model_name": "m"}]}, "needs model_name"),
        ({"model_list": [entry(URL, model="bedrock/x")]}, "does not begin with"),
        ({"model_list": [entry(URL, rpm=3)]}, "litellm_params.rpm"),
    ],
)
def test_what_is_not_honoured_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LLMProxy(**options)


async def test_it_starts_with_a_store_and_names_clear_models():
    two = [entry(URL), entry(URL, "n")]
    proxy = LLMProxy(model_list=two, litellm_config={"litellm_settings": {"num_retries": 2}})
    with pytest.raises(ValueError, match="has no store"):
        await proxy.start()
    with pytest.raises(RuntimeError, match="not running"):
        proxy.as_resource()
    proxy.set_store(InMemoryLightningStore())
    await proxy.start()
    with pytest.raises(ValueError, match="which model"):
        proxy.as_resource()
    with pytest.raises(ValueError, match="together"):
        proxy.as_resource("ro-1")
    assert proxy.as_resource(model="n").model == "n"
    await proxy.stop()
    await proxy.get_store().close()


async def test_a_store_that_is_away_gets_the_calls_later():
    store = FlakySpanStore(failures=2)
    calls = StoreCalls(store, window_seconds=0.01)
    for _ in range(3):
        calls.start_call("ro-1", "at-1").span.end()
    await calls.finish(deadline_seconds=5)
    assert [span.attributes[semconv.CALL_INDEX] for span in store.spans] == [0, 1, 2]
    assert [span.sequence_id for span in store.spans] == [1, 2, 3]


async def test_calls_that_wait_for_the_store_are_bounded():
    calls = StoreCalls(FlakySpanStore(failures=10**6), window_seconds=0.01, max_waiting=2)
    for _ in range(2):
        calls.start_call("ro-1", "at-1").span.end()
    with pytest.raises(TransientError, match="2 recorded calls wait"):
        calls.start_call("ro-1", "at-1")
    with pytest.raises(TransientError, match=r"2 recorded calls could not be stored .* is away"):
        await calls.finish(deadline_seconds=0.1)


async def test_it_serves_one_policy_with_the_seeds_that_rollouts_have_in_the_store():
    store = InMemoryLightningStore()
    seeded = await store.start_rollout({}, metadata={SEED: 7})
    unseeded = await store.start_rollout({})
    policy = PolicyRef(version="v1", weights_digest="sha256:aa", path="/nowhere")
    with ScriptedModelServer(model="v1", policy_version="v1", weights_digest="sha256:aa") as server:
        proxy = LLMProxy(model_list=[entry("http://127.0.0.1:1")], store=store)
        await proxy.start()
        backends = [Backend(server.base_url)]
        async with proxy.serving(backends, policy, {"max_tokens": 4}, 10.0) as llm:
            for rollout in (seeded, unseeded):
                url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
                async with openai.AsyncOpenAI(base_url=url, api_key="x") as client:
                    await client.chat.completions.create(model=llm.model, messages=MESSAGES)
            await proxy.flush()
            spans = [(await store.query_spans(r.rollout_id))[0] for r in (seeded, unseeded)]
            server.weights_digest = "sha256:bb"
            with pytest.raises(openai.APIStatusError, match="sha256:bb"):
                async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
                    await client.chat.completions.create(model=llm.model, messages=MESSAGES)
        assert proxy.is_running(), "as before, with its own models"
        await proxy.stop()
    seeds = [span.attributes[semconv.REQUEST_SEED] for span in spans]
    assert seeds == [call_seed(7, 0), call_seed(unseeded.rollout_id, 0)]
    assert [span.attributes[semconv.REQUEST_MAX_TOKENS] for span in spans] == [4, 4]


async def test_a_flush_of_a_store_that_is_away_says_how_many_calls_wait():
    calls = StoreCalls(FlakySpanStore(failures=1000))
    calls.start_call("ro-1", "at-1").span.end()
    with pytest.raises(TransientError, match="1 recorded calls were not stored within"):
        await calls.flush(0.1)
    await StoreCalls(FlakySpanStore()).flush(0.1)
