import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from agl_core import semconv
from agl_core.errors import ConfigError
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.llm_proxy.capture import call_seed
from agl_core.tracer import OtelTracer
from tests.fakes import ScriptedModelServer, encode_chars, scripted_reply

MESSAGES = [{"role": "user", "content": "hi"}]
PATH = "/rollout/ro-1/attempt/at-1/v1/chat/completions"


class Setup:
    """A proxy before a scripted backend, one open attempt and a client."""

    def __init__(self, server, proxy, tracer, trace, client):
        self.server = server
        self.proxy = proxy
        self.tracer = tracer
        self.trace = trace
        self.client = client

    def call(self, **body) -> httpx.Response:
        return self.client.post(PATH, json={"model": "m", "messages": MESSAGES, **body})

    def last_call(self):
        return self.trace.spans()[-1]


def wait_until(claim: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


@contextmanager
def running(**config):
    tracer = OtelTracer()
    with (
        ScriptedModelServer() as server,
        ProxyServer(ProxyConfig(backend_url=server.base_url, **config), tracer) as proxy,
        httpx.Client(base_url=proxy.url) as client,
        tracer.attempt("ro-1", "at-1") as trace,
    ):
        yield Setup(server, proxy, tracer, trace, client)


def test_call_is_answered_and_recorded():
    with running(rollout_seeds={"ro-1": 3}) as setup:
        response = setup.call(temperature=0.7, max_tokens=20)
        seed = call_seed(3, 0)
        text = scripted_reply(MESSAGES, seed)
        answer = response.json()
        assert response.status_code == 200
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["choices"][0]["logprobs"] is None
        assert "token_ids" not in answer["choices"][0]
        assert "prompt_token_ids" not in answer
        span = setup.last_call()
    recorded = span.attributes
    assert span.name == semconv.LLM_CALL_SPAN
    assert span.status.is_ok
    assert recorded[semconv.REQUEST_MODEL] == "m"
    assert recorded[semconv.REQUEST_TEMPERATURE] == 0.7
    assert recorded[semconv.REQUEST_MAX_TOKENS] == 20
    assert recorded[semconv.REQUEST_SEED] == seed
    assert recorded[semconv.RESPONSE_ID] == answer["id"]
    assert recorded[semconv.FINISH_REASONS] == ("stop",)
    assert recorded[semconv.PROMPT_TOKEN_IDS] == tuple(encode_chars("user: hi\nassistant: "))
    assert recorded[semconv.RESPONSE_TOKEN_IDS] == tuple(encode_chars(text))
    assert len(recorded[semconv.LOGPROBS]) == len(text)
    assert recorded[semconv.POLICY_VERSION] == "v000000"
    assert recorded[semconv.WEIGHTS_DIGEST] == "0" * 64
    assert recorded[semconv.CALL_INDEX] == 0
    assert recorded[semconv.HTTP_STATUS] == 200
    assert json.loads(recorded[semconv.INPUT_MESSAGES]) == MESSAGES
    assert json.loads(recorded[semconv.OUTPUT_MESSAGES])[0]["content"] == text


def test_what_the_agent_asks_for_it_gets():
    with running() as setup:
        answer = setup.call(logprobs=True, return_token_ids=True, seed=5).json()
        assert answer["choices"][0]["token_ids"] == encode_chars(scripted_reply(MESSAGES, 5))
        assert len(answer["choices"][0]["logprobs"]["content"]) == 8
        assert answer["prompt_token_ids"]
        assert setup.server.requests[0]["seed"] == 5


def test_agents_key_is_not_forwarded():
    with running(backend_api_key="for-the-backend") as setup:
        setup.client.headers["authorization"] = "Bearer of-the-agent"
        assert setup.call().status_code == 200
        assert "of-the-agent" not in str(setup.server.headers)
        assert setup.server.headers[0]["authorization"] == "Bearer for-the-backend"
        assert "of-the-agent" not in str(setup.last_call().attributes)


@pytest.mark.parametrize("status", [400, 404])
def test_backend_error_passes_through_and_is_recorded(status):
    with running() as setup:
        setup.server.fail_next(1, status)
        response = setup.call()
        assert response.status_code == status
        assert response.json()["error"]["message"] == f"scripted failure {status}"
        span = setup.last_call()
        assert not span.status.is_ok
        assert span.attributes[semconv.HTTP_STATUS] == status
        reason = f"the model server answered HTTP {status}: scripted failure {status}"
        assert span.status.description == reason
        assert setup.call().status_code == 200
        assert setup.last_call().attributes[semconv.CALL_INDEX] == 1


def test_retry_after_of_the_last_answer_passes_through():
    with running(max_tries=1) as setup:
        setup.server.fail_next(1, 429, retry_after_seconds=7)
        response = setup.call()
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")


def test_answer_without_token_ids_passes_through_and_is_marked():
    with running() as setup:
        setup.server.token_ids = False
        assert setup.call().status_code == 200
        span = setup.last_call()
        assert not span.status.is_ok
        assert span.status.description == "no token ids in the answer"


def test_missing_logprob_is_marked():
    with running() as setup:
        setup.server.logprobs_missing = 1
        assert setup.call().status_code == 200
        assert setup.last_call().status.description == "8 response token ids but 7 log-probs"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"n": 300, "stream": True}, "n=300"),
    ],
)
def test_what_is_not_served_yet_is_refused_and_recorded(body, words):
    with running() as setup:
        response = setup.call(**body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert words in setup.last_call().status.description
        assert setup.server.num_calls == 0


def test_broken_json_is_refused():
    with running() as setup:
        response = setup.client.post(PATH, content=b"{")
        assert response.status_code == 400
        assert "not JSON" in response.json()["error"]["message"]
        assert setup.client.post(PATH, content=b"[]").status_code == 400


def test_large_request_is_refused():
    with running(max_request_bytes=100) as setup:
        assert setup.call(user="x" * 200).status_code == 413
        assert setup.server.num_calls == 0


def test_request_that_does_not_arrive_is_refused():
    def slowly():
        yield b'{"mod'
        time.sleep(0.6)
        yield b'el": "m"}'

    with running(request_seconds=0.2) as setup:
        response = setup.client.post(PATH, content=slowly())
        assert response.status_code == 408
        assert "did not arrive within 0.2 s" in setup.last_call().status.description


def test_agent_that_leaves_in_its_request_is_recorded():
    with running() as setup:
        address = (setup.client.base_url.host, setup.client.base_url.port)
        with socket.create_connection(address) as connection:
            head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{{"
            connection.sendall(head.encode())
            time.sleep(0.1)
        wait_until(lambda: setup.trace.spans())
        assert "before it had sent its request" in setup.last_call().status.description


def test_attempt_that_is_not_running_is_unknown():
    with running() as setup:
        response = setup.client.post(PATH.replace("ro-1", "ro-2"), json={"messages": []})
        assert response.status_code == 404
        assert "rollout ro-2, attempt at-1 is not running here" in response.text


def test_other_paths_are_explained():
    with running() as setup:
        response = setup.client.post("/v1/chat/completions", json={})
        assert response.status_code == 404
        assert (
            "/rollout/{rollout_id}/attempt/{attempt_id}/v1" in response.json()["error"]["message"]
        )
        assert setup.client.get(PATH).status_code == 405


def test_health():
    with running() as setup:
        assert setup.client.get("/health").json() == {"status": "ok"}


def test_token_is_demanded_where_set():
    with running(token="secret") as setup:
        assert setup.call().status_code == 401
        setup.client.headers["authorization"] = "Bearer wrong"
        assert setup.call().status_code == 401
        setup.client.headers["authorization"] = "Bearer secret"
        assert setup.call().status_code == 200
        assert setup.proxy.as_resource("m").api_key == "secret"


def test_backend_deadline_becomes_504():
    with running(deadline_seconds=0.2) as setup:
        setup.server.delay_seconds = 1.0
        response = setup.call()
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "upstream_timeout"
        assert setup.last_call().attributes[semconv.HTTP_STATUS] == 504


def test_backend_that_is_gone_becomes_502():
    tracer = OtelTracer()
    config = ProxyConfig(backend_url="http://127.0.0.1:9/v1", max_tries=1)
    with ProxyServer(config, tracer) as proxy, tracer.attempt("ro-1", "at-1") as trace:
        response = httpx.post(proxy.url + PATH, json={"messages": MESSAGES})
    assert response.status_code == 502
    assert "cannot reach the model server" in trace.spans()[0].status.description


def test_call_that_outlives_its_attempt_is_recorded_as_that():
    tracer = OtelTracer()
    with (
        ScriptedModelServer() as server,
        ProxyServer(ProxyConfig(backend_url=server.base_url), tracer) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        server.delay_seconds = 0.6
        with tracer.attempt("ro-1", "at-1") as trace:
            call = pool.submit(httpx.post, proxy.url + PATH, json={"messages": MESSAGES})
            wait_until(lambda: server.num_calls == 1)
        assert call.result().status_code == 200
    call, root = trace.spans()
    assert (call.name, root.name) == (semconv.LLM_CALL_SPAN, semconv.ROLLOUT_SPAN)
    assert call.status.description == "the attempt ended before the answer"
    assert json.loads(call.attributes[semconv.INPUT_MESSAGES]), "what was asked is known"
    assert semconv.RESPONSE_TOKEN_IDS not in call.attributes
    assert tracer.late_spans == 0
    assert proxy.usage("ro-1")["failed_calls"] == 1


def test_ended_calls_are_not_held_until_their_attempt_ends():
    held = []
    with running() as setup:
        for stream in (False, True):
            setup.call(stream=stream)
            held.append(len(setup.trace._before_close))
    assert held == [0, 0]


def test_a_request_that_cannot_be_written_again_is_refused_in_the_agents_dialect():
    deep = {}
    for _ in range(300):
        deep = {"a": deep}
    with running() as setup:
        response = setup.call(tools=[deep])
        assert response.status_code == 400
        assert "cannot be sent on" in response.json()["error"]["message"]
        assert "cannot be sent on" in setup.last_call().status.description


def test_an_error_of_the_proxy_itself_has_a_shape_and_a_record(monkeypatch, caplog):
    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr("agl_core.llm_proxy.handler.fill_in", broken)
    with running() as setup:
        response = setup.call()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "proxy_error"
        assert setup.last_call().status.description == "the proxy failed: ZeroDivisionError"
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("name", ["token", "admin_token"])
def test_an_empty_token_is_none(name):
    with pytest.raises(ConfigError, match=f"^{name} is empty"):
        ProxyConfig(backend_url="http://127.0.0.1:9/v1", **{name: ""})


def test_the_scheme_of_a_token_may_be_in_lower_case():
    with running(token="secret") as setup:
        setup.client.headers["authorization"] = "bearer secret"
        assert setup.call().status_code == 200
        setup.client.headers["authorization"] = "secret"
        assert setup.call().status_code == 401


def test_agent_that_goes_away_stops_its_call():
    with running() as setup:
        setup.server.delay_seconds = 30.0
        with pytest.raises(httpx.ReadTimeout):
            setup.client.post(PATH, json={"messages": MESSAGES}, timeout=0.2)
        wait_until(lambda: setup.trace.spans())
        description = setup.last_call().status.description
        assert description == "the agent closed the connection before the answer"
        setup.server.delay_seconds = 0.0
        assert setup.call().status_code == 200
