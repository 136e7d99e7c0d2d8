"""Who may use a store behind a server, and from where."""

import asyncio
import multiprocessing
import pickle
import threading
from collections.abc import AsyncGenerator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agl_core.env_var import STORE_TOKEN
from agl_core.errors import ConfigError, StoreError, TransientError
from agl_core.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
)
from agl_core.utils.threaded_server import ThreadedServer
from tests.agl_core.store.builders import take

TOKEN = "a-secret-word"


@pytest.fixture
async def server() -> AsyncGenerator[LightningStoreServer]:
    server = LightningStoreServer(InMemoryLightningStore(), port=0, token=TOKEN)
    await server.start()
    yield server
    await server.close()


@pytest.mark.parametrize("token", [None, "another"])
async def test_a_store_with_a_token_refuses_those_without(
    server: LightningStoreServer, token: str | None
):
    async with LightningStoreClient(server.endpoint, token=token) as client:
        with pytest.raises(ValueError, match="wants its token"):
            await client.enqueue_rollout("task")
    async with httpx.AsyncClient(base_url=server.endpoint) as http:
        refused = await http.get("/v1/agl/statistics")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await http.post("/v1/traces")).status_code == 401
        assert (await http.get("/v1/agl/health")).json() == {"status": "ok"}


async def test_the_token_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(STORE_TOKEN, TOKEN)
    store = InMemoryLightningStore()
    async with LightningStoreServer(store, port=0) as server:
        async with LightningStoreClient(server.endpoint) as client:
            assert (await client.enqueue_rollout("task")).status == "queuing"
        monkeypatch.delenv(STORE_TOKEN)
        async with LightningStoreClient(server.endpoint) as client:
            with pytest.raises(ValueError, match=STORE_TOKEN):
                await client.statistics()
    await store.close()


@pytest.mark.parametrize("token", ["ä", "two words", "line\n"])
def test_a_token_that_cannot_be_sent_is_refused(token: str):
    with pytest.raises(ValueError, match="printable ASCII") as raised:
        LightningStoreClient("http://127.0.0.1:1", token=token)
    assert token not in str(raised.value)


def test_an_address_that_others_reach_needs_a_token():
    with pytest.raises(ConfigError, match="needs a token"):
        LightningStoreServer(InMemoryLightningStore(), host="0.0.0.0")


async def test_a_store_of_another_run_is_refused(server: LightningStoreServer):
    mine = await server.statistics()
    async with LightningStoreClient(
        server.endpoint, token=TOKEN, run_id=mine.get("run_id")
    ) as client:
        await client.enqueue_rollout("task")
    async with LightningStoreClient(server.endpoint, token=TOKEN, run_id="run-other") as client:
        with pytest.raises(ValueError, match=f"that of run {mine.get('run_id')}, not of run-other"):
            await client.dequeue_rollout()


async def test_several_starts_at_once_are_one_server():
    def serving() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("server-")]

    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    await asyncio.gather(*[server.start() for _ in range(4)])
    assert serving() == [f"server-{server.endpoint.rpartition(':')[2]}"]
    await asyncio.gather(server.stop(), server.stop())
    assert serving() == []
    await server.close()


async def test_the_port_of_another_store_is_refused(server: LightningStoreServer):
    port = int(server.endpoint.rpartition(":")[2])
    other = LightningStoreServer(InMemoryLightningStore(), port=port)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
        await other.start()
    await other.close()


def _work(store: LightningStore, answers: "multiprocessing.SimpleQueue[str]") -> None:
    async def work() -> str:
        taken = await take(store, "child")
        await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="succeeded")
        return taken.rollout_id

    answers.put(asyncio.run(work()))


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
async def test_a_child_process_reaches_the_store_through_its_server(
    server: LightningStoreServer, method: str
):
    queued = await server.enqueue_rollout("task")
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=_work, args=(server, answers))
    process.start()
    (ended,) = await server.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=60)
    assert (ended.status, await asyncio.to_thread(answers.get)) == ("succeeded", queued.rollout_id)
    process.join()


async def test_a_pickled_client_is_one_of_the_same_store(server: LightningStoreServer):
    client = LightningStoreClient(server.endpoint, token=TOKEN, run_id=server.run_id)
    copy: LightningStoreClient = pickle.loads(pickle.dumps(client))
    queued = await client.enqueue_rollout("task")
    assert (await take(copy)).rollout_id == queued.rollout_id
    assert TOKEN not in repr(client) + repr(vars(client)["_settings"])
    await client.close()
    await copy.close()


async def test_a_server_that_does_not_run_cannot_be_pickled():
    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    with pytest.raises(RuntimeError, match="await start"):
        pickle.dumps(server)
    await server.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launch_mode": "mp"}, "launch_mode 'mp' is not served"),
        ({"n_workers": 2}, "n_workers is 2"),
        ({"tracker": object()}, "not supported"),
        ({"launcher_args": object()}, "not supported"),
    ],
)
def test_arguments_that_are_not_honoured_are_refused(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        LightningStoreServer(InMemoryLightningStore(), **arguments)  # pyright: ignore[reportArgumentType]


def test_a_store_for_one_task_at_a_time_is_refused():
    with pytest.raises(ValueError, match="LightningStore may not be used by several tasks"):
        LightningStoreServer(LightningStore())


@pytest.mark.parametrize(
    "address",
    [
        "localhost:4747",
        "ftp://localhost",
        "http://",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:abc",
        "http://[::1",
    ],
)
def test_an_address_must_be_one_of_http(address: str):
    with pytest.raises(ValueError, match="it is http://host:port"):
        LightningStoreClient(address)


async def test_the_scheme_of_an_address_may_be_in_any_case(server: LightningStoreServer):
    address = server.endpoint.replace("http://", "HTTP://")
    async with LightningStoreClient(address + "/", token=TOKEN) as client:
        assert (await client.statistics()).get("run_id") == server.run_id
    assert client.otlp_traces_endpoint() == server.otlp_traces_endpoint()


async def test_an_answer_that_cannot_be_decoded_is_no_answer():
    async def answer(request: Request) -> Response:
        del request
        return Response(b"not gzip", headers={"content-encoding": "gzip"})

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    with ThreadedServer(app) as other:
        async with LightningStoreClient(other.url, retry_delays=(0.01,)) as client:
            with pytest.raises(TransientError, match="no answer"):
                await client.dequeue_rollout()


async def test_a_request_that_is_no_url_is_refused():
    async with LightningStoreClient("http://127.0.0.1:1") as client:
        with pytest.raises(StoreError, match="cannot be asked"):
            await client.get_rollout_by_id("x" * 100_000)


async def test_an_answer_that_is_not_one_of_a_store_is_refused():
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"hello": request.url.path})

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    with ThreadedServer(app) as other:
        async with LightningStoreClient(other.url) as client:
            with pytest.raises(ValueError, match="the answer to dequeue_many_rollouts"):
                await client.dequeue_rollout()


async def test_waits_end_when_the_server_stops():
    store = InMemoryLightningStore()
    server = await LightningStoreServer(store, port=0).start()
    queued = await store.enqueue_rollout("task")
    client = LightningStoreClient(server.endpoint, retry_delays=(0.01,), health_retry_delays=())
    waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=[queued.rollout_id]))
    await asyncio.sleep(0.2)
    await asyncio.wait_for(server.stop(), 2)
    with pytest.raises(ConnectionError, match="no answer"):
        await asyncio.wait_for(waiting, 5)
    await client.close()
    await server.close()


async def test_a_store_without_a_token_has_no_foreign_name():
    store = InMemoryLightningStore()
    async with LightningStoreServer(store, port=0) as server, httpx.AsyncClient() as http:
        url = f"{server.endpoint}/v1/agl/statistics"
        for name in ("localhost:1", "LOCALHOST:1", "127.0.0.1", "[::1]:5"):
            assert (await http.get(url, headers={"host": name})).status_code == 200
        assert (await http.get(url, headers={"host": "page.example:80"})).status_code == 403
    await store.close()


async def test_web_pages_of_named_origins_only():
    store = InMemoryLightningStore()
    origin = {"origin": "http://page.example"}
    asked = {"access-control-request-method": "POST", **origin}
    server = LightningStoreServer(
        store, port=0, cors_allow_origins=["http://page.example"], token=TOKEN
    )
    async with server, httpx.AsyncClient(base_url=server.endpoint) as http:
        preflight = await http.options("/v1/agl/rollouts", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == origin["origin"]
        other = await http.get("/v1/agl/health", headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers
    await store.close()


async def asked_by_a_page(
    cors_allow_origins: list[str], headers: dict[str, str], token: str | None = None
) -> int:
    """Return the status of a request as a page's script has the browser send it."""
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, port=0, cors_allow_origins=cors_allow_origins, token=token)
    if token is not None:
        headers = headers | {"authorization": f"Bearer {token}"}
    async with server, httpx.AsyncClient(base_url=server.endpoint) as http:
        await store.enqueue_rollout("task")
        answer = await http.post("/v1/agl/queues/rollouts/dequeue", headers=headers)
        num_queuing = (await store.query_rollouts(status_in=["queuing"])).total
    await store.close()
    assert num_queuing == (0 if answer.is_success else 1)
    return answer.status_code


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://page.example"},
        {"origin": "http://localhost.example:80", "sec-fetch-site": "cross-site"},
        {"origin": "null", "content-type": "text/plain"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
    ],
)
async def test_a_page_of_a_foreign_origin_takes_nothing_from_a_store_without_a_token(
    headers: dict[str, str],
):
    assert await asked_by_a_page([], headers) == 403
    assert await asked_by_a_page(["http://other.example"], headers) == 403
    assert await asked_by_a_page(["*"], headers) == 200
    assert await asked_by_a_page([], headers, token=TOKEN) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://page.example", "sec-fetch-site": "cross-site"},
        {"origin": "http://LocalHost:3000", "sec-fetch-site": "cross-site"},
        {"origin": "http://[::1]:3000"},
        {"sec-fetch-site": "none"},
        {},
    ],
)
async def test_named_pages_and_those_of_this_machine_may_ask(headers: dict[str, str]):
    assert await asked_by_a_page(["http://page.example"], headers) == 200
