"""What goes wrong between client and server has no effect, or the one that was asked for."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest

from agl_core.errors import TransientError
from agl_core.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
)
from tests.agl_core.store.builders import begin, make_resources, make_span, take
from tests.agl_core.store.faulty_proxy import FaultyProxy


@pytest.fixture
async def proxy() -> AsyncGenerator[FaultyProxy]:
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, port=0)
    async with server, FaultyProxy(server.endpoint) as proxy:
        yield proxy
    await store.close()


@pytest.fixture
async def client(proxy: FaultyProxy) -> AsyncGenerator[LightningStoreClient]:
    client = LightningStoreClient(
        proxy.url, retry_delays=(0.01, 0.01, 0.01), health_retry_delays=(0.01,), request_timeout=2
    )
    async with client:
        yield client


async def counts(store: LightningStore) -> tuple[int | None, int | None, int | None]:
    found = await store.statistics()
    return found.get("total_rollouts"), found.get("total_attempts"), found.get("total_spans")


async def test_a_lost_answer_to_a_dequeue_gives_the_same_attempt(
    client: LightningStoreClient, proxy: FaultyProxy
):
    await client.enqueue_rollout("a")
    await client.enqueue_rollout("b")
    proxy.expect("lose", "lose", "pass")
    taken = await take(client, "w")
    assert len(proxy.paths) == 3
    assert (taken.input, taken.attempt.sequence_id) == ("a", 1)
    assert await counts(client) == (2, 1, 0)
    assert (await take(client)).input == "b"


async def test_a_lost_answer_does_not_make_records_twice(
    client: LightningStoreClient, proxy: FaultyProxy
):
    proxy.expect("lose")
    await client.enqueue_rollout("a")
    proxy.expect("lose")
    started = await client.start_rollout("b")
    assert await counts(client) == (2, 1, 0)
    proxy.expect("lose")
    again = await client.start_attempt(started.rollout_id)
    assert again.attempt.sequence_id == 2
    assert await counts(client) == (2, 2, 0)
    proxy.expect("lose")
    resources = await client.add_resources(make_resources())
    assert (await client.query_resources()).total == 1
    proxy.expect("lose")
    updated = await client.update_resources(resources.resources_id, make_resources())
    assert updated.version == 2


async def test_a_lost_answer_about_spans_is_given_again(
    client: LightningStoreClient, proxy: FaultyProxy
):
    taken = await begin(client)
    spans = [make_span(taken, number) for number in (1, 2)]
    proxy.expect("lose")
    assert await client.add_many_spans(spans) == spans
    assert await client.add_many_spans(spans) == []
    proxy.expect("lose")
    pair = (taken.rollout_id, taken.attempt.attempt_id)
    assert await client.get_many_span_sequence_ids([pair, pair]) == [3, 4]
    assert await client.get_next_span_sequence_id(*pair) == 5
    assert await counts(client) == (1, 1, 2)


async def test_a_repeated_requeue_does_not_take_the_rollout_from_who_got_it(
    client: LightningStoreClient, proxy: FaultyProxy
):
    taken = await begin(client)
    other = LightningStoreClient(client.server_address, retry_delays=(0.3,))
    proxy.expect("lose")
    requeue = asyncio.create_task(other.update_rollout(taken.rollout_id, status="requeuing"))
    await asyncio.sleep(0.1)
    again = await take(client)
    assert again.attempt.sequence_id == 2
    await requeue
    found = await client.get_latest_attempt(taken.rollout_id)
    assert found is not None
    assert found.status == "preparing"
    await other.close()


async def test_an_answer_that_is_too_late_is_asked_for_again(proxy: FaultyProxy):
    async with LightningStoreClient(proxy.url, retry_delays=(0.01,), request_timeout=0.2) as client:
        proxy.expect(0.6)
        await client.enqueue_rollout("a")
        assert len(proxy.paths) == 2
        assert (await counts(client))[0] == 1


async def test_a_server_that_is_busy_is_asked_again(
    client: LightningStoreClient, proxy: FaultyProxy
):
    proxy.expect("503", "503", "pass")
    await client.enqueue_rollout("a")
    assert (await counts(client))[0] == 1


async def test_a_server_that_stays_away_is_a_transient_error(
    client: LightningStoreClient, proxy: FaultyProxy
):
    proxy.expect(*["503"] * 9)
    with pytest.raises(TransientError, match=r"statistics: no answer from the store .*HTTP 503"):
        await client.statistics()
    assert len(proxy.paths) == 4
    async with LightningStoreClient(proxy.url, retry_delays=()) as once:
        proxy.expect("lose")
        with pytest.raises(TransientError, match="RemoteProtocolError"):
            await once.dequeue_rollout()
        assert len(proxy.paths) == 1


async def test_nothing_is_asked_of_a_server_that_is_not_well():
    async with LightningStoreClient(
        "http://127.0.0.1:9", retry_delays=(0.01,), health_retry_delays=(0.01, 0.01)
    ) as client:
        with pytest.raises(TransientError, match="ConnectError"):
            await client.statistics()


async def test_a_refusal_is_not_asked_again(client: LightningStoreClient, proxy: FaultyProxy):
    proxy.expect()
    with pytest.raises(ValueError, match="Rollout ro-0 not found"):
        await client.start_attempt("ro-0")
    assert len(proxy.paths) == 1


class Broken(InMemoryLightningStore):
    async def get_latest_resources(self):
        raise KeyError("secret detail")


async def test_what_fails_in_the_server_is_in_its_log_only(caplog: pytest.LogCaptureFixture):
    store = Broken()
    async with LightningStoreServer(store, port=0) as server:
        client = LightningStoreClient(server.endpoint, retry_delays=())
        with caplog.at_level(logging.ERROR), pytest.raises(TransientError) as raised:
            await client.get_latest_resources()
        await client.close()
    assert "HTTP 500" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "secret detail" in caplog.text
    await store.close()
