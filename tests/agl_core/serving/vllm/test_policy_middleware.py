"""A vLLM with the middleware says which policy answers, and takes the next one."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from agl_core.serving.vllm import policy_middleware
from agl_core.serving.vllm.policy_middleware import PolicyMiddleware
from tests.fake_vllm import FakeVllm

HEADERS = ("x-agl-policy-version", "x-agl-weights-digest")


def write_weights(folder: Path, rows: int = 2, adapter: bool = False) -> Path:
    folder.mkdir()
    save_file({"w": torch.zeros(rows, 3)}, folder / "model.safetensors", {"format": "pt"})
    if adapter:
        (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    first = write_weights(tmp_path / "first")
    for name, value in (("VERSION", "v000000"), ("DIGEST", "d0"), ("PATH", str(first))):
        monkeypatch.setenv(f"AGL_POLICY_{name}", value)
    monkeypatch.setenv("AGL_POLICY_MODEL", "policy")
    fake = FakeVllm("policy", str(first))
    fake.app.add_middleware(PolicyMiddleware)
    return fake


@pytest.fixture
async def client(fake: FakeVllm) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(fake.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def chat(client: httpx.AsyncClient, version: str, path: str = "chat/") -> httpx.Response:
    body = {"model": version, "messages": [{"role": "user", "content": "Hi"}]}
    return await client.post(f"/v1/{path}completions", json=body)


async def load(client: httpx.AsyncClient, version: str, folder: Path) -> httpx.Response:
    body = {"version": version, "path": str(folder), "weights_digest": f"d-{version}"}
    return await client.post("/policy", json=body)


def stamp(response: httpx.Response) -> tuple[str, ...]:
    return tuple(response.headers[name] for name in HEADERS)


async def test_a_policys_version_is_the_models_name_and_answers_say_it(
    client: httpx.AsyncClient,
) -> None:
    answer = await chat(client, "v000000")
    assert answer.status_code == 200
    assert stamp(answer) == ("v000000", "d0")
    assert answer.json()["choices"][0]["message"]["content"] == "first"
    other = await chat(client, "v000001")
    assert other.status_code == 404
    assert other.json()["error"]["message"] == "model v000001 is not served; serving v000000"
    policy = (await client.get("/policy")).json()
    assert policy.pop("vllm")
    assert policy == {
        "version": "v000000",
        "weights_digest": "d0",
        "engine": "vllm",
        "logprobs_mode": "processed_logprobs",
    }


async def test_new_weights_are_loaded_while_vllm_is_paused(
    client: httpx.AsyncClient, fake: FakeVllm, tmp_path: Path
) -> None:
    second = write_weights(tmp_path / "second")
    loaded = await load(client, "v000001", second)
    assert (loaded.json()["version"], loaded.json()["weights_digest"]) == ("v000001", "d-v000001")
    assert fake.events == ["pause", "reload second", "resume"]
    assert fake.weight_version == "v000001"
    answer = await chat(client, "v000001")
    assert stamp(answer) == ("v000001", "d-v000001")
    assert answer.json()["choices"][0]["message"]["content"] == "second"
    assert (await chat(client, "v000000")).status_code == 404


async def test_calls_that_run_are_waited_for_and_new_ones_are_put_off(
    client: httpx.AsyncClient, fake: FakeVllm, tmp_path: Path
) -> None:
    second = write_weights(tmp_path / "second")
    fake.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(chat(client, "v000000"))
        await asyncio.sleep(0.05)
        loading = group.create_task(load(client, "v000001", second))
        await asyncio.sleep(0.05)
        put_off = await chat(client, "v000001")
        assert put_off.status_code == 503
        assert put_off.headers["retry-after"] == "1"
        assert fake.events == []
        fake.gate.set()
    assert stamp(running.result()) == ("v000000", "d0")
    assert running.result().json()["choices"][0]["message"]["content"] == "first"
    assert loading.result().status_code == 200
    assert stamp(await chat(client, "v000001")) == ("v000001", "d-v000001")


async def test_calls_that_never_end_keep_the_old_weights(
    client: httpx.AsyncClient,
    fake: FakeVllm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_middleware, "_DRAIN_SECONDS", 0.1)
    fake.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(chat(client, "v000000"))
        await asyncio.sleep(0.05)
        refused = await load(client, "v000001", write_weights(tmp_path / "second"))
        fake.gate.set()
    assert refused.status_code == 503
    assert "1 calls still run after 0.1 s" in refused.json()["error"]["message"]
    assert stamp(await chat(client, "v000000")) == ("v000000", "d0")


async def test_two_adapters_are_served_at_once_beside_the_weights(
    client: httpx.AsyncClient, fake: FakeVllm, tmp_path: Path
) -> None:
    versions = ("v000001", "v000002")
    for version in versions:
        folder = write_weights(tmp_path / f"adapter-{version}", rows=9, adapter=True)
        assert (await load(client, version, folder)).json()["version"] == version
    assert fake.events == []
    for version in versions:
        answer = await chat(client, version)
        assert stamp(answer) == (version, f"d-{version}")
        assert answer.json()["choices"][0]["message"]["content"] == f"adapter-{version}"
    assert stamp(await chat(client, "v000000")) == ("v000000", "d0")
    assert (await client.get("/policy")).json()["version"] == "v000002"


async def test_other_weights_drop_the_adapters_made_for_the_old_ones(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await load(client, "v000001", write_weights(tmp_path / "adapter", adapter=True))
    await load(client, "v000002", write_weights(tmp_path / "second"))
    assert (await chat(client, "v000001")).status_code == 404
    assert (await chat(client, "v000002")).status_code == 200


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


@pytest.mark.parametrize("what", ["nothing", "other shape", "cut short", "no header"])
async def test_weights_that_cannot_be_loaded_are_refused_before_anything_is_touched(
    client: httpx.AsyncClient, fake: FakeVllm, tmp_path: Path, what: str
) -> None:
    folder = write_weights(tmp_path / "second", rows=5 if what == "other shape" else 2)
    file = folder / "model.safetensors"
    expected = {
        "nothing": "no *.safetensors file",
        "other shape": "1 tensors differ, first w: [2, 3] is served, [5, 3] is there",
        "cut short": "model.safetensors is cut short",
        "no header": "cannot be read",
    }[what]
    if what == "nothing":
        file.unlink()
    elif what == "cut short":
        cut_short(folder)
    elif what == "no header":
        file.write_bytes(b"xx")
    refused = await load(client, "v000001", folder)
    assert refused.status_code == 400
    assert expected in refused.json()["error"]["message"]
    assert fake.events == []
    assert stamp(await chat(client, "v000000")) == ("v000000", "d0")


@pytest.mark.parametrize("what", ["worker fails", "version is not taken"])
async def test_after_a_reload_that_failed_nothing_is_served(
    client: httpx.AsyncClient, fake: FakeVllm, tmp_path: Path, what: str
) -> None:
    folder = write_weights(tmp_path / "second")
    fake.can_set_version = what == "worker fails"
    if what == "worker fails":
        (folder / "BROKEN").touch()
    failed = await load(client, "v000001", folder)
    assert failed.status_code == 500
    assert "v000001 was not loaded" in failed.json()["error"]["message"]
    assert fake.events[-1] == "resume"
    assert (await chat(client, "v000000")).status_code == 503
    assert (await client.get("/policy")).status_code == 500


async def test_a_vllm_without_the_routes_is_named(
    client: httpx.AsyncClient, fake: FakeVllm, tmp_path: Path
) -> None:
    fake.app.router.routes[:] = [
        route for route in fake.app.router.routes if getattr(route, "path", "") != "/pause"
    ]
    refused = await load(client, "v000001", write_weights(tmp_path / "second"))
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message == (
        "this vLLM has no /pause: start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1"
    )
    assert stamp(await chat(client, "v000000")) == ("v000000", "d0")


async def test_every_route_but_health_wants_the_token(
    fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("AGL_TOKEN_FILE", str(tmp_path / "token"))
    transport = httpx.ASGITransport(fake.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/policy", "/weight_info"):
            assert (await client.get(path)).status_code == 401
            right = {"authorization": "Bearer secret"}
            assert (await client.get(path, headers=right)).status_code == 200
        assert (await client.post("/collective_rpc", json={})).status_code == 401


@pytest.mark.parametrize("body", [b"{", b"[]", json.dumps({"version": "v1"}).encode()])
async def test_bad_requests_are_refused(client: httpx.AsyncClient, body: bytes) -> None:
    assert (await client.post("/policy", content=body)).status_code == 400


async def test_it_stands_alone(tmp_path: Path) -> None:
    """vLLM's environment has none of this project's packages."""
    shutil.copyfile(policy_middleware.__file__, tmp_path / "alone.py")
    process = await asyncio.create_subprocess_exec(
        "python3", "-I", "-S", str(tmp_path / "alone.py"), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_a_stream_passes_through_stamped(fake: FakeVllm, client: httpx.AsyncClient) -> None:
    seen: dict[str, Any] = {}

    async def streamed(scope: Any, receive: Any, send: Any) -> None:
        seen["body"] = await receive()
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    transport = httpx.ASGITransport(PolicyMiddleware(streamed))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as other:
        answer = await chat(other, "v000000")
    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
    assert stamp(answer) == ("v000000", "d0")
    assert json.loads(seen["body"]["body"])["model"] == "policy"
