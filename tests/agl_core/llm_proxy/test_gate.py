"""Pauses while weights are swapped, and accounts."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from agl_core.errors import TransientError
from agl_core.llm_proxy import Backend, Price, ProxyConfig, ProxyServer
from agl_core.tracer import OtelTracer
from tests.agl_core.llm_proxy.test_app import MESSAGES, PATH, running, wait_until
from tests.fakes import ScriptedModelServer

ADMIN = {"authorization": "Bearer boss"}


def test_calls_under_way_end_before_the_swap_and_others_are_told_to_come_again():
    with running() as setup, ThreadPoolExecutor(2) as pool:
        setup.server.delay_seconds = 0.5
        call = pool.submit(setup.call)
        wait_until(lambda: setup.server.num_calls == 1)
        with setup.proxy.paused(drain_seconds=10, retry_after_seconds=0.25):
            assert call.done() or call.result(0.1).status_code == 200
            refused = setup.call()
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "0.25")
            assert refused.json()["error"]["code"] == "weights_are_swapped"
            assert setup.server.num_calls == 1
            url = f"{setup.proxy.url}{PATH.removesuffix('/chat/completions')}"
            client = openai.OpenAI(base_url=url, api_key="x", max_retries=5)
            waiting = pool.submit(
                client.chat.completions.create, model="m", messages=MESSAGES, seed=1
            )
        assert waiting.result(10).choices
        client.close()
        assert setup.call().status_code == 200


def test_drain_has_a_deadline():
    with running() as setup, ThreadPoolExecutor(1) as pool:
        setup.server.delay_seconds = 1.0
        call = pool.submit(setup.call)
        wait_until(lambda: setup.server.num_calls == 1)
        with (
            pytest.raises(TransientError, match=r"1 model calls did not end within 0.1 s"),
            setup.proxy.paused(drain_seconds=0.1),
        ):
            pytest.fail("the block begins though a call is served")
        assert call.result().status_code == 200
        assert setup.call().status_code == 200


def test_a_stream_is_waited_for_to_its_end():
    with running() as setup:
        setup.server.gate = threading.Semaphore(3)
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        with setup.client.stream("POST", PATH, json=body) as response:
            arriving = response.iter_raw()
            next(arriving)
            with pytest.raises(TransientError), setup.proxy.paused(drain_seconds=0.1):
                pytest.fail("the block begins though a stream is served")
            setup.server.gate = None
            assert b"[DONE]" in b"".join(arriving)
        with setup.proxy.paused(drain_seconds=5):
            pass


def test_usage_is_counted_by_rollout():
    with running(prices={"m": Price(1.0, 2.0)}) as setup:
        setup.call()
        setup.call()
        setup.server.fail_next(1, 400)
        setup.call()
        setup.call(model="free")
        usage = setup.proxy.usage("ro-1")
        prompt = len("user: hi\nassistant: ")
        assert usage == {
            "calls": 4,
            "failed_calls": 1,
            "prompt_tokens": 3 * prompt,
            "completion_tokens": 24,
            "cost": pytest.approx(2 * (prompt * 1.0 + 8 * 2.0) / 1e6),
        }
        assert setup.proxy.usage() == usage
        assert setup.proxy.usage("ro-2")["calls"] == 0


def test_a_stream_is_counted_too():
    with running(prices={"*": Price(1.0, 1.0)}) as setup:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        setup.client.post(PATH, json=body)
        assert setup.proxy.usage("ro-1")["completion_tokens"] == 8


def test_answers_without_token_ids_are_said_once(caplog):
    with running() as setup:
        setup.server.token_ids = False
        setup.call()
        setup.call()
    assert caplog.text.count("the model server gives no token ids") == 1
    assert "rollout=ro-1" in caplog.text


def admin(setup, method, what, **body):
    return setup.client.request(method, f"/admin/{what}", json=body, headers=ADMIN)


def test_trainers_elsewhere_pause_and_replace():
    with running(admin_token="boss") as setup:
        assert setup.client.get("/admin/status").status_code == 401
        setup.call()
        paused = admin(setup, "POST", "pause", retry_after_seconds=2, drain_seconds=5).json()
        assert (paused["is_paused"], paused["calls_in_flight"]) == (True, 0)
        assert setup.call().status_code == 429
        url = paused["backends"][0]["url"]
        replaced = admin(setup, "PUT", "backends", urls=[url, "http://127.0.0.1:9/v1"]).json()
        assert [entry["url"] for entry in replaced["backends"]] == [url, "http://127.0.0.1:9/v1"]
        assert admin(setup, "POST", "resume").json()["is_paused"] is False
        assert setup.call().status_code == 200
        assert admin(setup, "GET", "usage").json()["ro-1"]["calls"] == 2


@pytest.mark.parametrize(
    ("method", "what", "body", "status"),
    [
        ("POST", "pause", {"drain": 1}, 400),
        ("POST", "pause", {"drain_seconds": "x"}, 400),
        ("PUT", "backends", {"urls": "x"}, 400),
        ("PUT", "backends", {"urls": []}, 400),
        ("PUT", "backends", {"urls": ["ftp://x"]}, 400),
        ("PUT", "backends", {"urls": ["http://[x/v1"]}, 400),
        ("GET", "pause", {}, 404),
    ],
)
def test_odd_requests_of_trainers_are_refused(method, what, body, status):
    with running(admin_token="boss") as setup:
        response = admin(setup, method, what, **body)
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_pause_that_is_given_up_lets_calls_in_again():
    with running(admin_token="boss") as setup, ThreadPoolExecutor(1) as pool:
        setup.server.delay_seconds = 1.0
        call = pool.submit(setup.call)
        wait_until(lambda: setup.server.num_calls == 1)
        response = admin(setup, "POST", "pause", drain_seconds=0.1)
        assert response.status_code == 504
        assert call.result().status_code == 200
        setup.server.delay_seconds = 0.0
        assert setup.call().status_code == 200
        assert admin(setup, "GET", "status").json()["is_paused"] is False


def test_replaced_servers_are_asked_with_the_key_and_name_that_are_known():
    with ScriptedModelServer() as other, ScriptedModelServer() as server:
        config = ProxyConfig(
            backends=(Backend(server.base_url, "key", "m", "upstream", returns_token_ids=False),),
            admin_token="boss",
        )
        tracer = OtelTracer()
        with ProxyServer(config, tracer) as proxy, tracer.attempt("ro-1", "at-1"):
            urls = {"urls": [other.base_url]}
            replaced = httpx.put(f"{proxy.url}/admin/backends", json=urls, headers=ADMIN)
            assert replaced.status_code == 200
            body = {"model": "m", "messages": MESSAGES}
            assert httpx.post(proxy.url + PATH, json=body).status_code == 200
        (sent,) = other.requests
        assert (sent["model"], "return_token_ids" in sent) == ("upstream", False)
        assert other.headers[0]["authorization"] == "Bearer key"


def test_without_an_admin_token_there_is_no_admin():
    with running() as setup:
        assert httpx.get(f"{setup.proxy.url}/admin/status", headers=ADMIN).status_code == 404
