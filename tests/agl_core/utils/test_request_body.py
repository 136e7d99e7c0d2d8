"""Limits of JSON bodies, as numbers and before a real server process."""

import contextlib
import gzip
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import psutil
import pytest

from agl_core.utils.request_body import (
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_VALUES,
    BodyRefused,
    check_json,
)

SERVER = """
import asyncio
from agl_core.store import InMemoryLightningStore, LightningStoreServer

async def main():
    async with LightningStoreServer(InMemoryLightningStore(), port=0) as server:
        print(server.endpoint, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
MIB = 1024 * 1024
ENQUEUE = "/v1/agl/queues/rollouts/enqueue"


def nested_input(text: bytes) -> bytes:
    return b'{"rollouts":[{"input":' + text + b"}]}"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" + b"{}," * MAX_CONTAINERS + b"{}]", "objects and lists"),
        (b"[" * (MAX_CONTAINERS + 1), "objects and lists"),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", "values"),
        (b"{" + b'"a":1 ' * (MAX_KEYS + 1) + b"}", "keys"),
    ],
)
def test_a_body_of_too_many_parts_is_refused_unparsed(body: bytes, what: str):
    with pytest.raises(BodyRefused, match=f"the request has .* {what}; the limit is") as caught:
        check_json(body)
    assert caught.value.status == 413


def test_bodies_of_usual_size_pass():
    span = {"attributes": {f"a{n}": n for n in range(20)} | {"ids": [50_000] * 200}}
    spans = orjson.dumps({"spans": [span] * 10_000})
    prompt = orjson.dumps({"prompt": [100_000] * 200_000, "text": "word: [x], {y} " * 40_000})
    row = orjson.dumps({"input": {f"key {n}": ["text", n] for n in range(40_000)}})
    assert len(row) > MIB
    for body in (spans, prompt, row):
        assert check_json(body) is body


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, int]]:
    """Give a store's address and the id of its process."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def asking_health(url: str, pid: int) -> Iterator[list[float]]:
    """Give the CPU-seconds that the server spent until each answer while the block runs.

    On a busy machine, an answer's time by the clock says more about the other processes.
    """
    process = psutil.Process(pid)

    def seconds() -> float:
        return sum(process.cpu_times()[:2])

    waits: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as http:
            while not (waits and is_over.is_set()):
                begin = seconds()
                assert http.get(f"{url}/v1/agl/health").is_success
                waits.append(seconds() - begin)
                time.sleep(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        pytest.param(
            gzip.compress(gzip.compress(b" " * 512 * MIB)),
            {"content-encoding": "gzip"},
            422,
            id="gzip in gzip",
        ),
        pytest.param(gzip.compress(b" " * 256 * MIB), {"content-encoding": "gzip"}, 413, id="gzip"),
        pytest.param(nested_input(b"[" + b"{}," * (20 * MIB) + b"{}]"), {}, 413, id="objects"),
        pytest.param(nested_input(b"[" + b"1," * (30 * MIB) + b"1]"), {}, 413, id="numbers"),
        pytest.param(nested_input(b"[" * 290_000), {}, 422, id="nesting"),
        pytest.param(
            b'{"rollouts":[' + b'{"input":1},' * 290_000 + b'{"input":1}]}', {}, 422, id="rollouts"
        ),
    ],
)
def test_health_is_answered_while_a_costly_body_is_refused(
    store: tuple[str, int], body: bytes, headers: dict[str, str], status: int
):
    with asking_health(*store) as waits, httpx.Client(timeout=60) as http:
        headers = {"content-type": "application/json"} | headers
        answer = http.post(store[0] + ENQUEUE, content=body, headers=headers)
    assert answer.status_code == status
    assert max(waits) < 1.0
