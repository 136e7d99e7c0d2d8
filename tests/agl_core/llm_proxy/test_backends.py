import time
from contextlib import ExitStack
from threading import Thread

import pytest

from agl_core.errors import ConfigError, UpstreamError
from agl_core.llm_proxy.backends import Backend, Backends
from agl_core.llm_proxy.upstream import Upstream, UpstreamStream
from tests.fakes import ScriptedModelServer

GONE = "http://127.0.0.1:9/v1"


def request(text="hi", **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def make(*urls, **options):
    return Backends([Backend(url, **options) for url in urls])


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(ScriptedModelServer()) for _ in range(2)]


def test_calls_that_begin_alike_prefer_the_same_server():
    backends = make("http://a/v1", "http://b/v1", "http://c/v1")
    chosen = {backends.choose(request(f"{n % 20}")).base_url for n in range(60)}
    assert len(chosen) == 3
    for n in range(20):
        assert len({backends.choose(request(f"{n}")).base_url for _ in range(3)}) == 1
    longer = request("1")
    longer["messages"] += [{"role": "assistant", "content": "x"}] * 2
    other = request("1")
    other["messages"] += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert backends.choose(longer) is backends.choose(other)


def test_a_busy_server_is_preferred_no_longer():
    backends = make("http://a/v1", "http://b/v1")
    loads = {"http://a/v1": 0, "http://b/v1": 0}
    for _ in range(40):
        live = backends.choose(request())
        live.num_in_flight += 1
        loads[live.base_url] += 1
    assert max(loads.values()) - min(loads.values()) <= 10


def test_there_must_be_a_server_of_that_model():
    with pytest.raises(ConfigError, match="no model server"):
        Backends([])
    with pytest.raises(ConfigError, match="no http"):
        Backend("localhost:8000")
    with pytest.raises(UpstreamError, match="no model server has 'other'; there are: m"):
        make("http://a/v1", model="m").choose(request(model="other"))


@pytest.mark.parametrize("url", ["http://user:s3cret@gpu:8000/v1", "ftp://user:s3cret@gpu/v1"])
def test_a_password_in_an_address_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match="model server gpu has a user or password") as caught:
        Backend(url)
    assert "s3cret" not in str(caught.value)


def test_a_new_address_needs_one_set_of_keys_and_names():
    two = Backends([Backend("http://a/v1", "x", "m"), Backend("http://b/v1", "y", "n")])
    two.readdress(["http://b/v1"])
    assert [entry["url"] for entry in two.status()] == ["http://b/v1"]
    two.readdress(["http://c/v1"])
    mixed = Backends([Backend("http://a/v1", "x", "m"), Backend("http://b/v1", "y", "n")])
    with pytest.raises(ConfigError, match="is new"):
        mixed.readdress(["http://a/v1", "http://c/v1"])


async def test_a_failing_server_is_left_for_another_at_once(servers):
    backends = make(*(server.base_url for server in servers))
    first = next(s for s in servers if s.base_url == backends.choose(request()).base_url)
    first.fail_next(1, 503, retry_after_seconds=30)
    started = time.monotonic()
    async with Upstream(backends) as upstream:
        assert (await upstream.send("/chat/completions", request())).status == 200
    assert time.monotonic() - started < 5
    assert [server.num_calls for server in servers] == [1, 1]


async def test_a_server_that_is_gone_is_down_until_it_answers(servers):
    backends = make(GONE, servers[0].base_url)
    async with Upstream(backends) as upstream:
        for n in range(12):
            assert (await upstream.send("/chat/completions", request(f"{n}"))).status == 200
        status = {entry["url"]: entry for entry in backends.status()}
        assert not status[GONE]["is_up"]
        assert status[servers[0].base_url] == {
            "url": servers[0].base_url,
            "is_up": True,
            "in_flight": 0,
        }
        for live in backends._live:
            live.mark(is_up=False)
            await live.probe()
        assert [entry["is_up"] for entry in backends.status()] == [False, True]


async def test_changed_addresses_are_followed_by_a_call_under_way(servers):
    backends = make(GONE)
    async with Upstream(backends, deadline_seconds=20) as upstream:

        def replace():
            time.sleep(0.3)
            backends.replace([Backend(servers[0].base_url)])

        changing = Thread(target=replace)
        changing.start()
        assert (await upstream.send("/chat/completions", request())).status == 200
        changing.join()
        await backends.close_retired()
        assert backends._retired == []


async def test_a_stream_counts_until_it_is_closed(servers):
    backends = make(servers[0].base_url)
    async with Upstream(backends) as upstream:
        stream = await upstream.send("/chat/completions", request(stream=True))
        assert isinstance(stream, UpstreamStream)
        assert backends.status()[0]["in_flight"] == 1
        await stream.close()
        assert backends.status()[0]["in_flight"] == 0


async def test_requests_are_in_the_dialect_of_the_server(servers):
    servers[0].token_ids = False
    named = Backend(servers[0].base_url, "key", "m", "served", returns_token_ids=False)
    async with Upstream(Backends([named])) as upstream:
        await upstream.send("/chat/completions", request(return_token_ids=True))
    assert servers[0].requests == [request(model="served")]
    assert servers[0].headers[0]["authorization"] == "Bearer key"
