"""A network with an HTTP proxy, as companies have it: requests to this machine do not reach it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

SCRIPT = """
import asyncio, httpx
from pathlib import Path
from tempfile import TemporaryDirectory
from deployments.server import named_server
named_server()
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    client.hello().raise_for_status()
from tests.agl_core.runner.test_agent_pool import POLICY, ScriptedModelServer, make_shard, run

async def main():
    with ScriptedModelServer(weights_digest=POLICY.weights_digest) as server, \\
            TemporaryDirectory() as folder:
        for isolation in ("none", "process"):
            shard = make_shard(
                Path(folder, isolation), server, "calls_with_every_client", ["return"]
            )
            shard.settings = shard.settings.model_copy(update={"isolation": isolation})
            found = await run(shard)
            assert found["return"][0].reward == 1.0, found
asyncio.run(main())
print(httpx.get("http://elsewhere.example/").text)
"""


class _Proxy(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"by the proxy")

    do_POST = do_CONNECT = do_GET  # noqa: N815 - the base class calls them so

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def http_proxy() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("Proxy", (_Proxy,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_only_requests_to_other_machines_go_through_the_proxy(
    prefect_api: str, http_proxy: tuple[str, list[str]]
):
    assert os.environ["PREFECT_API_URL"] == prefect_api
    url, asked = http_proxy
    names = ("http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env | dict.fromkeys(names, url),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "by the proxy"
    assert asked == ["http://elsewhere.example/"], json.dumps(asked)
