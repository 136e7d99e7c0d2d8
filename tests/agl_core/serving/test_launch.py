from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agl_core.config import ServingSettings
from agl_core.llm_proxy.server import ThreadedServer
from agl_core.serving.launch import ModelServer
from tests.builders import POLICY


async def metrics(request: Request) -> JSONResponse:
    return JSONResponse({"requests_total": 3})


async def policy(request: Request) -> JSONResponse:
    return JSONResponse({"version": POLICY.version, "weights_digest": POLICY.weights_digest})


def test_a_proxy_of_the_environment_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    app = Starlette(routes=[Route("/policy", policy), Route("/metrics", metrics)])
    with (
        ThreadedServer(app) as proxied,
        ModelServer.start(ServingSettings(url=proxied.url), POLICY, tmp_path) as server,
    ):
        assert server.metrics() == {"requests_total": 3}
