"""A runner of either package works for a store of the other, each in a process of its own."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import agl_core as agl
from agl_core.llm_proxy.capture import request_attributes, response_attributes
from tests.peer.sides import PEER_PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.peer,
    pytest.mark.skipif(PEER_PYTHON not in os.environ, reason=f"{PEER_PYTHON} is not set"),
]
_STARTS_WITHIN = 120.0
_SCRIPT = Path(__file__).with_name("runner_on.py")


def _python(package: str) -> str:
    return sys.executable if package == "agl_core" else os.environ[PEER_PYTHON]


@contextmanager
def _store(package: str, folder: Path) -> Iterator[str]:
    """Run `agl store` of a package and give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    agl_command = Path(_python(package)).with_name("agl")
    with (folder / "store.log").open("w") as log:
        process = subprocess.Popen(
            [agl_command, "store", "--port", str(port)], cwd=folder, stdout=log, stderr=log
        )
        try:
            until = time.monotonic() + _STARTS_WITHIN
            while not _is_healthy(address):
                assert process.poll() is None, (folder / "store.log").read_text()
                assert time.monotonic() < until, (folder / "store.log").read_text()
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait(30)


def _is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/v1/agl/health", trust_env=False).is_success
    except httpx.RequestError:
        return False


@pytest.mark.parametrize(
    ("runner", "store"), [("agl_core", "agentlightning"), ("agentlightning", "agl_core")]
)
def test_a_runner_works_for_a_store_of_the_other_package(runner, store, tmp_path):
    async def enqueue(client: agl.LightningStoreClient) -> str:
        await client.add_resources({"llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")})
        return (await client.enqueue_rollout("task")).rollout_id

    async def look(client: agl.LightningStoreClient, rollout_id: str):
        return await client.get_rollout_by_id(rollout_id), await client.query_spans(rollout_id)

    with _store(store, tmp_path) as address:
        client = agl.LightningStoreClient(address)
        rollout_id = asyncio.run(enqueue(client))
        done = subprocess.run(
            [_python(runner), _SCRIPT, runner, address],
            capture_output=True,
            text=True,
            timeout=180,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.getcwd() if runner == "agl_core" else ""},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        rollout, spans = asyncio.run(look(client, rollout_id))
    assert rollout.status == "succeeded", done.stderr[-4000:]
    assert agl.find_final_reward(spans) == 0.5
    assert ["a", "b"] in [span.attributes.get("labels") for span in spans]


def test_the_adapters_of_the_peer_read_our_spans(tmp_path, monkeypatch):
    monkeypatch.setenv("AGL_FLAT_MESSAGES", "1")
    request = {"model": "m", "messages": [{"role": "user", "content": "1+1?"}]}
    answer = {
        "id": "r1",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "message": {"role": "assistant", "content": "two"},
                "finish_reason": "stop",
                "token_ids": [3],
            }
        ],
    }
    tracer = agl.OtelTracer()
    with tracer.attempt("ro-1", "at-1") as trace:
        span = tracer.start_call("ro-1", "at-1").span
        span.set_attributes(request_attributes(request) | response_attributes(answer, {}))
        span.end()
        agl.emit_reward(1.0)
    lines = "\n".join(
        span.model_dump_json() for span in sorted(trace.recorded(), key=lambda s: s.sequence_id)
    )
    done = subprocess.run(
        [os.environ[PEER_PYTHON], Path(__file__).with_name("read_spans.py")],
        input=lines,
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "ids": [[[1, 2], [3], 1.0]],
        "messages": [["user", "assistant"]],
        "texts": ["two"],
    }
