"""Anthropic's client asks how long a prompt is, through the proxy, of a real engine."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agl_core import semconv
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.serving.engine import Engine
from agl_core.serving.engine_server import create_app
from agl_core.tracer import OtelTracer
from agl_core.types.training import PolicyRef
from agl_core.utils.threaded_server import ThreadedServer
from tests.agl_core.llm_proxy.replay import TEXT, replaying
from tests.agl_core.serving.conftest import TOOL_TEMPLATE, write_policy

anthropic = pytest.importorskip("anthropic", reason="in the extra `dev`")

ASK: dict[str, Any] = {
    "model": "v000000",
    "system": "Use the tool.",
    "messages": [{"role": "user", "content": "What is 12+34?"}],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """An engine that shows tools; its URL and the digest of its weights."""
    folder = write_policy(tmp_path_factory.mktemp("policy"), seed=2, template=TOOL_TEMPLATE)
    engine = Engine(folder, "v000000")
    with ThreadedServer(create_app(engine)) as server:
        yield f"{server.url}/v1", engine.policy.weights_digest
    engine.close()


def client(url: str, attempt: str = "/rollout/ro-1/attempt/at-1") -> Any:
    return anthropic.Anthropic(base_url=f"{url}{attempt}", api_key="none", max_retries=0)


def calls(trace: Any) -> int:
    """How many the proxy recorded; Anthropic's client may leave spans of its own."""
    return sum(span.name == semconv.LLM_CALL_SPAN for span in trace.spans())


def test_the_count_is_that_of_the_call_and_is_not_recorded(engine: tuple[str, str]) -> None:
    url, digest = engine
    policy = PolicyRef(version="v000000", weights_digest=digest, path="-")
    tracer = OtelTracer()
    with (
        ProxyServer(ProxyConfig(backend_url=url, policy=policy), tracer) as proxy,
        tracer.attempt("ro-1", "at-1") as trace,
        client(proxy.url) as asking,
    ):
        counted = asking.messages.count_tokens(**ASK)
        assert calls(trace) == 0
        called = asking.messages.create(**ASK, max_tokens=1)
        assert calls(trace) == 1
        without_tools = asking.messages.count_tokens(model="v000000", messages=ASK["messages"])
    assert counted.input_tokens == called.usage.input_tokens > without_tools.input_tokens > 0


def test_what_cannot_be_counted_is_said(engine: tuple[str, str]) -> None:
    url, _ = engine
    other = PolicyRef(version="v000000", weights_digest="sha256:other", path="-")
    with ProxyServer(ProxyConfig(backend_url=url), OtelTracer()) as proxy:
        with client(proxy.url) as asking:
            with pytest.raises(anthropic.NotFoundError, match="v000009"):
                asking.messages.count_tokens(**ASK | {"model": "v000009"})
            with pytest.raises(anthropic.BadRequestError, match="thinking is not supported"):
                asking.messages.count_tokens(**ASK, thinking={"type": "adaptive"})
        with (
            client(proxy.url, attempt="") as asking,
            pytest.raises(anthropic.NotFoundError, match="belongs to no attempt"),
        ):
            asking.messages.count_tokens(**ASK)
        answer = httpx.get(f"{proxy.url}/v1/messages/count_tokens")
        assert (answer.status_code, "not served here" in answer.text) == (405, True)
    with (
        ProxyServer(ProxyConfig(backend_url=url, policy=other), OtelTracer()) as proxy,
        client(proxy.url) as asking,
        pytest.raises(anthropic.InternalServerError, match="this rollout is for v000000"),
    ):
        asking.messages.count_tokens(**ASK)


def test_a_server_that_counts_nothing_is_an_error() -> None:
    with (
        replaying(TEXT) as setup,
        client(setup.url.split("/rollout")[0]) as asking,
        pytest.raises(anthropic.NotFoundError, match="answered HTTP 404"),
    ):
        asking.messages.count_tokens(**ASK)
