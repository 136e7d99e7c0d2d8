"""The wire format, byte for byte where Agent Lightning 0.3 fixes it."""

import asyncio
import gzip
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from agl_core.errors import StoreError
from agl_core.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agl_core.types.core import EnqueueRolloutRequest, Rollout
from tests.agl_core.store.builders import make_span, take
from tests.agl_core.store.conftest import Clock

NOW = 1_000_000.0
CONFIG = {
    "timeout_seconds": None,
    "unresponsive_seconds": None,
    "max_attempts": 1,
    "retry_condition": [],
}
SPAN = {
    "sequence_id": 1,
    "trace_id": "0" * 32,
    "span_id": "1" * 16,
    "parent_id": None,
    "name": "step",
    "status": {"status_code": "OK", "description": None},
    "attributes": {"agentlightning.reward.0.value": 0.75, "ids": [1, 2]},
    "events": [],
    "links": [],
    "start_time": 1.5,
    "end_time": 2.5,
    "context": None,
    "parent": None,
    "resource": {"attributes": {}, "schema_url": ""},
}
LLM = {
    "resource_type": "proxy_llm",
    "endpoint": "http://h:1",
    "model": "m",
    "api_key": None,
    "sampling_parameters": {"temperature": 0.5},
}


@pytest.fixture
async def server(clock: Clock) -> AsyncGenerator[LightningStoreServer]:
    server = LightningStoreServer(
        InMemoryLightningStore(clock=clock), port=0, max_request_bytes=100_000
    )
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def http(server: LightningStoreServer) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{server.endpoint}/v1/agl") as http:
        yield http


async def asked(
    http: httpx.AsyncClient, path: str, body: Any = None, status: int = 200, **query: Any
) -> Any:
    """POST where there is a body, else GET; return the JSON of the answer."""
    if body is None:
        answer = await http.get(path, params=query)
    else:
        answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


async def dequeued(http: httpx.AsyncClient) -> tuple[str, str]:
    await asked(http, "/queues/rollouts/enqueue", {"rollouts": [{"input": "task"}]}, 201)
    (taken,) = await asked(http, "/queues/rollouts/dequeue", {"limit": 1, "worker_id": "w"})
    return taken["rollout_id"], taken["attempt"]["attempt_id"]


async def test_health(http: httpx.AsyncClient):
    assert await asked(http, "/health") == {"status": "ok"}


async def test_queue(http: httpx.AsyncClient):
    request = {"input": {"q": 1}, "mode": "train", "config": {"max_attempts": 2}, "metadata": None}
    (queued,) = await asked(http, "/queues/rollouts/enqueue", {"rollouts": [request]}, 201)
    rollout = {
        "rollout_id": queued["rollout_id"],
        "input": {"q": 1},
        "start_time": NOW,
        "end_time": None,
        "mode": "train",
        "resources_id": None,
        "status": "queuing",
        "config": CONFIG | {"max_attempts": 2},
        "metadata": None,
    }
    assert queued == rollout
    (taken,) = await asked(http, "/queues/rollouts/dequeue", {"limit": 1, "worker_id": "w"})
    attempt = taken.pop("attempt")
    assert taken == rollout | {"status": "preparing"}
    assert attempt == {
        "rollout_id": queued["rollout_id"],
        "attempt_id": attempt["attempt_id"],
        "sequence_id": 1,
        "start_time": NOW,
        "end_time": None,
        "status": "preparing",
        "worker_id": "w",
        "last_heartbeat_time": None,
        "metadata": None,
        "failure_kind": None,
        "failure_message": None,
    }
    assert await asked(http, "/queues/rollouts/dequeue", {}) == []
    page = await asked(http, "/rollouts/search", {"rollout_id_in": [queued["rollout_id"]]})
    assert page == {"items": [taken | {"attempt": attempt}], "limit": -1, "offset": 0, "total": 1}
    path = f"/rollouts/{queued['rollout_id']}"
    assert await asked(http, path) == taken | {"attempt": attempt}
    assert await asked(http, f"{path}/attempts/latest") == attempt
    assert (await asked(http, f"{path}/attempts"))["items"] == [attempt]
    assert (await asked(http, f"{path}/attempts/search", {}))["items"] == [attempt]


async def test_rollouts_and_attempts(http: httpx.AsyncClient):
    started = await asked(http, "/rollouts", {"input": 1, "worker_id": "w"}, 201)
    assert (started["status"], started["attempt"]["worker_id"]) == ("preparing", "w")
    path = f"/rollouts/{started['rollout_id']}"
    again = await http.post(f"{path}/attempts")
    assert (again.status_code, again.json()["attempt"]["sequence_id"]) == (201, 2)
    ended = await asked(http, f"{path}/attempts/latest", {"status": "succeeded", "metadata": None})
    assert (ended["status"], ended["end_time"]) == ("succeeded", NOW)
    changed = await asked(http, path, {"metadata": {"a": 1}})
    assert (changed["metadata"], changed["status"]) == ({"a": 1}, "succeeded")
    waited = await asked(http, "/waits/rollouts", {"rollout_ids": [started["rollout_id"], "ro-0"]})
    assert [rollout["status"] for rollout in waited] == ["succeeded"]
    assert await asked(http, "/rollouts/ro-0") is None
    assert await asked(http, "/rollouts/ro-0/attempts/latest") is None


async def test_lists_in_a_query(http: httpx.AsyncClient):
    await dequeued(http)
    await asked(http, "/rollouts", {"input": 1}, 201)
    page = await asked(http, "/rollouts", status_in=["preparing", "running"], limit=1)
    assert (len(page["items"]), page["limit"], page["total"]) == (1, 1, 2)
    assert (await asked(http, "/rollouts", status_in="queuing"))["total"] == 0
    workers = await asked(http, "/workers", status_in="busy", worker_id_contains="w")
    assert [worker["worker_id"] for worker in workers["items"]] == ["w"]


async def test_spans(http: httpx.AsyncClient):
    rollout_id, attempt_id = await dequeued(http)
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    assert await asked(http, "/spans/next", ids) == {"sequence_id": 1}
    assert await asked(http, "/spans", SPAN | ids, 201) == SPAN | ids
    assert await asked(http, "/spans", SPAN | ids, 201) is None
    found = {"items": [SPAN | ids], "limit": -1, "offset": 0, "total": 1}
    assert await asked(http, "/spans", rollout_id=rollout_id) == found
    search = {"rollout_id": rollout_id, "attempt_id": "latest", "limit": -1, "name_contains": "te"}
    assert await asked(http, "/spans/search", search) == found
    batch = {"spans": [SPAN | ids, SPAN | ids | {"span_id": "2" * 16}]}
    assert await asked(http, "/spans/batch", batch, 201) == [False, True]
    pairs = {"rollout_attempt_ids": [[rollout_id, attempt_id]] * 2}
    assert await asked(http, "/spans/next/batch", pairs) == [2, 3]


async def test_resources(http: httpx.AsyncClient):
    added = await asked(http, "/resources", {"main_llm": LLM}, 201)
    update = {
        "resources_id": added["resources_id"],
        "create_time": NOW,
        "update_time": NOW,
        "version": 1,
        "resources": {"main_llm": LLM},
    }
    assert added == update
    assert await asked(http, "/resources/latest") == update
    path = f"/resources/{added['resources_id']}"
    prompt = {"resource_type": "prompt_template", "template": "{x}", "engine": "f-string"}
    second = update | {"version": 2, "resources": {"p": prompt}}
    assert await asked(http, path, {"p": prompt}) == second
    assert await asked(http, path) == second
    assert (await asked(http, "/resources", resources_id_contains="rs-"))["items"] == [second]
    assert await asked(http, "/resources/rs-0") is None


async def test_workers_and_leases(http: httpx.AsyncClient):
    rollout_id, attempt_id = await dequeued(http)
    beat = await asked(http, "/workers/w", {"heartbeat_stats": {"cpu": 1}})
    assert (beat["heartbeat_stats"], beat["status"]) == ({"cpu": 1}, "busy")
    assert await asked(http, "/workers/w") == beat
    assert await asked(http, "/workers/nobody") is None
    attempts = {"worker_id": "w", "attempts": [[rollout_id, attempt_id], [rollout_id, "at-0"]]}
    assert await asked(http, "/leases/renew", attempts) == ["at-0"]
    assert (await asked(http, "/statistics"))["total_rollouts"] == 1


async def test_ids_of_any_characters(server: LightningStoreServer):
    client = server.client()
    for name in ("host/1 \u00e4?#%2F", "a/../b", "x" * 500, ".", "..", "..."):
        assert (await client.update_worker(name)).worker_id == name
        assert await client.get_worker_by_id(name) == await server.get_worker_by_id(name)
        await client.update_resources(f"rs/{name}", {})
        found = await client.get_resources_by_id(f"rs/{name}")
        assert found is not None
        assert found.resources_id == f"rs/{name}"
    await client.close()


async def test_ids_that_no_record_has(server: LightningStoreServer):
    client = server.client()
    for name in ("", "ro/1", ".", ".."):
        assert await client.get_rollout_by_id(name) is None
        assert await client.get_latest_attempt(name) is None
        with pytest.raises(StoreError):
            await client.update_rollout(name, status="failed")
    assert await client.get_worker_by_id("") is None
    assert await client.get_resources_by_id("") is None
    with pytest.raises(StoreError, match="there is no worker_id ''"):
        await client.update_worker("")
    await client.close()


async def test_ids_that_a_path_takes_are_refused(server: LightningStoreServer):
    client = server.client()
    for call in (
        client.update_worker("search"),
        client.update_rollout("search", status="failed"),
        client.get_resources_by_id("latest"),
    ):
        with pytest.raises(StoreError, match="choose another id"):
            await call
    assert await client.get_worker_by_id("search") is None
    assert await client.get_rollout_by_id("search") is None
    await client.close()


@pytest.mark.parametrize("key", ["k\u00e4y", "two\nlines", " k ", "50%25", "\x00"])
async def test_keys_of_any_characters(server: LightningStoreServer, key: str):
    client = server.client()
    requests = [EnqueueRolloutRequest(input="task")]
    queued = await client.enqueue_many_rollouts(requests, idempotency_key=key)
    again = await client.enqueue_many_rollouts(requests, idempotency_key=key)
    direct = await server.enqueue_many_rollouts(requests, idempotency_key=key)
    assert queued == again == direct
    with pytest.raises(StoreError, match="cannot be sent"):
        await client.enqueue_many_rollouts(requests, idempotency_key="\ud800")
    await client.close()


async def test_runs_of_any_characters(clock: Clock):
    store = InMemoryLightningStore(clock=clock)
    async with LightningStoreServer(store, port=0, run_id="r\u00fcn 1\n") as server:
        async with server.client() as client:
            assert (await client.statistics()).get("total_rollouts") == 0
        async with LightningStoreClient(server.endpoint, run_id="\u00e4") as client:
            with pytest.raises(StoreError, match="not of \u00e4"):
                await client.statistics()
    await store.close()


async def test_a_wait_ends_when_its_client_leaves(http: httpx.AsyncClient, clock: Clock):
    ended = asyncio.Event()

    class Store(InMemoryLightningStore):
        async def wait_for_rollouts(self, **given: Any) -> list[Rollout]:
            try:
                return await super().wait_for_rollouts(**given)
            finally:
                loop.call_soon_threadsafe(ended.set)

    loop = asyncio.get_running_loop()
    store = Store(clock=clock)
    queued = await store.enqueue_rollout("task")
    async with LightningStoreServer(store, port=0) as server:
        body = {"rollout_ids": [queued.rollout_id], "timeout": 20}
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{server.endpoint}/v1/agl/waits/rollouts", json=body, timeout=0.3)
        await asyncio.wait_for(ended.wait(), 5)
    await store.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("/queues/rollouts/enqueue", {}, 422, "rollouts: Field required"),
        ("/queues/rollouts/enqueue", {"rollouts": [{"inputs": 1}]}, 422, "rollouts.0.input"),
        ("/queues/rollouts/dequeue", {"limit": "many"}, 422, "limit: "),
        ("/queues/rollouts/dequeue", {"limits": 1}, 422, "limits: Extra inputs"),
        ("/rollouts", {"input": 1, "mode": "sleep"}, 422, "mode: "),
        ("/rollouts/search", {"sort_by": "mood"}, 400, "cannot sort by 'mood'"),
        ("/rollouts/search", {"limit": -2}, 400, "limit is -2"),
        ("/rollouts/search", {"offset": -1}, 400, "offset is -1"),
        ("/rollouts/search", {"filter_logic": "xor"}, 400, "filter logic is 'xor'"),
        ("/rollouts/search", {"sort_order": "up"}, 400, "sort order is 'up'"),
        ("/rollouts/ro-0", {"mode": "train"}, 400, "Rollout ro-0 not found"),
        ("/rollouts/ro-0", {"status": None}, 400, "status: "),
        ("/rollouts/ro-0", {"config": None}, 400, "config: "),
        ("/rollouts/ro-0/attempts", {}, 400, "Rollout ro-0 not found"),
        ("/rollouts/ro-0/attempts/latest", {"status": None}, 400, "status: "),
        ("/rollouts/ro-0/attempts/latest", {"worker_id": None}, 400, "worker_id: "),
        ("/rollouts/ro-0/attempts/latest", {"last_heartbeat_time": None}, 400, "heartbeat_time"),
        ("/workers/w", {"heartbeat_stats": None}, 400, "heartbeat_stats: "),
        ("/spans", {"name": "x"}, 422, "rollout_id: Field required"),
        ("/spans", SPAN | {"rollout_id": "ro-0", "attempt_id": "at-0"}, 400, "ro-0 not found"),
        ("/spans/search", {}, 422, "rollout_id: Field required"),
        ("/resources", {"a": {"resource_type": "hat"}}, 422, "a: "),
        ("/resources", ["a"], 422, "should be an object"),
        ("/nothing", {}, 404, "POST /v1/agl/nothing is not served here"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, path: str, body: Any, status: int, detail: str):
    answer = await asked(http, path, body, status)
    assert list(answer) == ["detail"]
    assert detail in answer["detail"]


async def test_bodies_that_are_not_read(http: httpx.AsyncClient):
    async def post(content: bytes, **headers: str) -> tuple[int, str]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await http.post("/rollouts", content=content, headers=names)
        return answer.status_code, answer.json()["detail"]

    assert (await post(b"{", content_type="application/json"))[0] == 422
    assert (await post(b"{}", content_type="text/plain"))[0] == 415
    assert (await post(b"{}"))[0] == 415
    large = b'{"input": "' + b"x" * 100_000 + b'"}'
    assert await post(large, content_type="application/json") == (
        413,
        "the request is larger than 100000 bytes",
    )
    bomb = gzip.compress(b'{"input": "' + b"x" * 10_000_000 + b'"}')
    assert len(bomb) < 100_000
    gzipped = {"content_type": "application/json", "content_encoding": "gzip"}
    assert (await post(bomb, **gzipped))[0] == 413
    assert (await post(b"nonsense", **gzipped))[0] == 400
    assert (await post(bomb[:-20], **gzipped))[0] in (400, 413)


async def test_a_key_gives_the_first_answer_again(http: httpx.AsyncClient):
    rollout_id, attempt_id = await dequeued(http)
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    key = {"idempotency-key": "k"}
    for _ in range(2):
        first = await http.post("/spans/next", json=ids, headers=key)
        assert first.json() == {"sequence_id": 1}
        started = await http.post("/rollouts", json={"input": 1}, headers=key)
        assert started.status_code == 201
    assert (await asked(http, "/statistics"))["total_rollouts"] == 2


async def test_a_wait_says_how_many_are_pending(
    http: httpx.AsyncClient, server: LightningStoreServer
):
    rollout_id, _ = await dequeued(http)
    body = {"rollout_ids": [rollout_id, "ro-0"], "timeout": 0.05}
    answer = await http.post("/waits/rollouts", json=body)
    assert (answer.json(), answer.headers["x-agl-pending"]) == ([], "1")
    await server.update_attempt(rollout_id, "latest", status="failed")
    answer = await http.post("/waits/rollouts", json=body)
    assert (len(answer.json()), answer.headers["x-agl-pending"]) == (1, "0")


async def test_spans_beyond_a_request_go_in_parts(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    monkeypatch.setattr("agl_core.store.client._BATCH_CHARACTERS", 5000)
    store = InMemoryLightningStore(clock=clock)
    async with LightningStoreServer(store, port=0, max_request_bytes=10_000) as server:
        client = server.client()
        await client.enqueue_rollout("task")
        taken = await take(client)
        spans = [make_span(taken, n, attributes={"text": "x" * 1500}) for n in range(1, 21)]
        assert await client.add_many_spans(spans) == spans
        assert list(await client.query_spans(taken.rollout_id)) == spans
        large = make_span(taken, 21, attributes={"text": "x" * 20_000})
        with pytest.raises(ValueError, match="larger than 10000 bytes"):
            await client.add_span(large)
        await client.close()
    await store.close()
