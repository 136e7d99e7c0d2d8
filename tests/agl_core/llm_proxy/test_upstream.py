import asyncio
import time

import orjson
import pytest

from agl_core.errors import UpstreamError
from agl_core.llm_proxy.backends import Backend, Backends
from agl_core.llm_proxy.upstream import Upstream, UpstreamTimeout
from tests.fakes import ScriptedModelServer

REQUEST = {"messages": [{"role": "user", "content": "hi"}]}


def upstream_of(*urls, api_key=None, **options):
    return Upstream(Backends([Backend(url, api_key) for url in urls]), **options)


async def post(server: ScriptedModelServer, **options):
    async with upstream_of(server.base_url, **options) as upstream:
        return await upstream.send("/chat/completions", REQUEST)


@pytest.mark.parametrize("status", [408, 409, 429, 502, 503, 504])
async def test_status_that_may_pass_is_retried(status):
    with ScriptedModelServer() as server:
        server.fail_next(2, status, retry_after_seconds=0)
        assert (await post(server)).status == 200
        assert server.num_calls == 3


@pytest.mark.parametrize("status", [400, 404, 501])
async def test_other_status_is_handed_on_at_once(status):
    with ScriptedModelServer() as server:
        server.fail_next(1, status)
        reply = await post(server)
        assert reply.status == status
        assert orjson.loads(reply.content)["error"]["message"] == f"scripted failure {status}"
        assert server.num_calls == 1


async def test_500_gets_two_more_tries():
    with ScriptedModelServer() as server:
        server.fail_next(2, 500)
        assert (await post(server)).status == 200
        server.fail_next(3, 500)
        assert (await post(server)).status == 500
        assert server.num_calls == 6


async def test_retry_after_is_honoured():
    with ScriptedModelServer() as server:
        server.fail_next(1, 429, retry_after_seconds=0.7)
        started = time.monotonic()
        assert (await post(server)).status == 200
        assert time.monotonic() - started >= 0.7


async def test_last_answer_is_handed_on_where_the_next_try_would_pass_the_deadline():
    with ScriptedModelServer() as server:
        server.fail_next(1, 503, retry_after_seconds=60)
        started = time.monotonic()
        assert (await post(server, deadline_seconds=2.0)).status == 503
        assert time.monotonic() - started < 5.0
        assert server.num_calls == 1


async def test_tries_are_bounded():
    with ScriptedModelServer() as server:
        server.fail_next(9, 503, retry_after_seconds=0)
        assert (await post(server, max_tries=3)).status == 503
        assert server.num_calls == 3


async def test_slow_server_ends_at_the_deadline():
    with ScriptedModelServer() as server:
        server.delay_seconds = 1.0
        with pytest.raises(UpstreamTimeout, match=r"within 0.2 s"):
            await post(server, deadline_seconds=0.2)


async def test_unreachable_server_is_retried_until_the_deadline():
    started = time.monotonic()
    async with upstream_of("http://127.0.0.1:9/v1", deadline_seconds=1.0) as upstream:
        with pytest.raises(UpstreamError, match="cannot reach the model server: Cannot connect"):
            await upstream.send("/chat/completions", REQUEST)
    assert 0.2 < time.monotonic() - started < 5.0


async def test_concurrent_calls_keep_their_own_retries():
    with ScriptedModelServer() as server:
        server.fail_next(8, 503, retry_after_seconds=0)
        async with upstream_of(server.base_url) as upstream:
            posts = [upstream.send("/chat/completions", REQUEST) for _ in range(8)]
            replies = await asyncio.gather(*posts)
        assert [r.status for r in replies] == [200] * 8
        assert server.num_calls == 16


async def test_backend_key_is_sent():
    with ScriptedModelServer() as server:
        await post(server, api_key="backend-key")
        assert server.headers[0]["authorization"] == "Bearer backend-key"
