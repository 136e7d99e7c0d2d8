import socket
import time

import httpx
import pytest

from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.tracer import OtelTracer
from tests.builders import statuses_for_a_page

CONFIG = ProxyConfig(backend_url="http://127.0.0.1:9/v1")


def test_server_starts_on_a_free_port_and_stops():
    first, second = ProxyServer(CONFIG, OtelTracer()), ProxyServer(CONFIG, OtelTracer())
    with first, second:
        assert first.url != second.url
        assert httpx.get(f"{first.url}/health").status_code == 200
        address = first.url
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    with pytest.raises(RuntimeError, match="not running"):
        _ = first.url


async def test_server_starts_and_stops_beside_an_event_loop():
    async with ProxyServer(CONFIG, OtelTracer()) as server, httpx.AsyncClient() as client:
        assert (await client.get(f"{server.url}/health")).status_code == 200


def test_stop_is_quick_with_an_open_connection():
    server = ProxyServer(CONFIG, OtelTracer()).start()
    with httpx.Client(base_url=server.url) as client:
        client.get("/health")
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 4.0
    server.stop()


def test_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ProxyServer(CONFIG, OtelTracer(), port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            server.start()


def test_open_address_needs_a_token():
    with pytest.raises(ValueError, match="needs a token"):
        ProxyServer(CONFIG, OtelTracer(), host="0.0.0.0")


def test_resource_points_at_the_proxy():
    with ProxyServer(CONFIG, OtelTracer()) as server:
        llm = server.as_resource("m", {"temperature": 1.0})
        url = llm.get_base_url("ro-1", "at-1")
        assert url == f"{server.url}/rollout/ro-1/attempt/at-1/v1"
        assert llm.sampling_parameters == {"temperature": 1.0}


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
def test_a_running_proxy_without_a_token_refuses_what_a_web_page_sends(path: str):
    tracer = OtelTracer()
    with ProxyServer(CONFIG, tracer) as server, tracer.attempt("ro-1", "at-1"):
        url = f"{server.url}/rollout/ro-1/attempt/at-1/v1/{path}"
        assert statuses_for_a_page(url) == [403, 403, 403, 415]
