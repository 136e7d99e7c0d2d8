"""Several real engines behind one proxy when the policy changes: each answer is checked."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_core import semconv
from agl_core.config import ServingSettings
from agl_core.errors import UpstreamError
from agl_core.ledger.storage import Storage
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.llm_proxy.backends import Backend
from agl_core.serving.engine import Engine
from agl_core.serving.engine_server import create_app
from agl_core.serving.launch import ModelServer
from agl_core.serving.weights import weights_digest
from agl_core.tracer import OtelTracer
from agl_core.types.training import PolicyRef
from agl_core.utils.threaded_server import ThreadedServer
from tests.agl_core.serving.conftest import write_policy

NUM_CALLS = 12


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[PolicyRef]:
    folders = [write_policy(tmp_path_factory.mktemp(f"v{seed}"), seed) for seed in (0, 1)]
    return [
        PolicyRef(version=f"v{number:06d}", weights_digest=weights_digest(folder), path=str(folder))
        for number, folder in enumerate(folders)
    ]


@pytest.fixture
def servers(policies: list[PolicyRef], tmp_path: Path) -> Iterator[list[ModelServer]]:
    """Two engines with the first policy, attached as a run attaches to `serving.url`."""
    first = policies[0]
    with ExitStack() as stack:
        attached: list[ModelServer] = []
        for name in ("one", "two"):
            engine = stack.enter_context(closing(Engine(Path(first.path or ""), first.version)))
            running = stack.enter_context(ThreadedServer(create_app(engine)))
            server = ModelServer.start(ServingSettings(url=running.url), first, tmp_path / name)
            attached.append(stack.enter_context(server))
        yield attached


def call_all(servers: list[ModelServer], policy: PolicyRef) -> tuple[Counter[int], list[Any], str]:
    """Call through a proxy before the servers; return statuses, spans, and what was refused."""
    backends = tuple(Backend(f"{server.url}/v1") for server in servers)
    tracer = OtelTracer()

    def call(number: int) -> httpx.Response:
        message = {"role": "user", "content": f"What is {number}+34?"}
        body = {"model": policy.version, "messages": [message], "max_tokens": 4}
        url = f"{proxy.url}/rollout/ro-1/attempt/at-1/v1/chat/completions"
        return httpx.post(url, json=body, timeout=60)

    with (
        ProxyServer(ProxyConfig(backends=backends, policy=policy), tracer) as proxy,
        tracer.attempt("ro-1", "at-1") as trace,
        ThreadPoolExecutor(NUM_CALLS) as pool,
    ):
        answers = list(pool.map(call, range(NUM_CALLS)))
        spans = trace.spans()
    refused = "".join(answer.text for answer in answers if answer.status_code != 200)
    return Counter(answer.status_code for answer in answers), spans, refused


def test_after_an_update_of_every_engine_all_calls_are_answered_by_the_new_policy(
    servers: list[ModelServer], policies: list[PolicyRef], local_storage: Storage
) -> None:
    for server in servers:
        server.serve(policies[1], local_storage)
    statuses, spans, _ = call_all(servers, policies[1])
    assert statuses == {200: NUM_CALLS}
    assert {span.attributes[semconv.WEIGHTS_DIGEST] for span in spans} == {
        policies[1].weights_digest
    }
    assert all(server.metrics()["requests_total"] for server in servers)


def test_a_run_s_servers_load_a_policy_together_and_one_that_is_gone_is_named(
    servers: list[ModelServer], policies: list[PolicyRef], local_storage: Storage, tmp_path: Path
) -> None:
    settings = ServingSettings(url=tuple(server.url for server in servers))
    with ModelServer.start(settings, policies[0], tmp_path / "both") as both:
        assert both.urls == tuple(server.url for server in servers)
        both.serve(policies[1], local_storage)
        statuses, _, _ = call_all(servers, policies[1])
        assert statuses == {200: NUM_CALLS}

        servers[1].serve(policies[0], local_storage)  # as another run would
        both.serve(policies[1], local_storage)
        assert call_all(servers[1:], policies[1])[0] == {200: NUM_CALLS}

    gone = "http://127.0.0.1:9"
    private = tempfile.TemporaryDirectory(dir=tmp_path)
    with (
        ModelServer((servers[0].url, gone), private) as partly_gone,
        pytest.raises(UpstreamError, match=f"{gone}/policy does not answer"),
    ):
        partly_gone.serve(policies[0], local_storage)


def test_an_engine_that_was_left_out_answers_nothing_that_is_trained_on(
    servers: list[ModelServer], policies: list[PolicyRef], local_storage: Storage
) -> None:
    servers[0].serve(policies[1], local_storage)
    statuses, spans, refused = call_all(servers, policies[1])
    assert set(statuses) == {200, 503}
    assert "this rollout is for v000001" in refused
    recorded = [span for span in spans if span.status.is_ok]
    assert len(recorded) == statuses[200] == servers[0].metrics()["requests_total"]
    assert servers[1].metrics()["requests_total"] == 0
