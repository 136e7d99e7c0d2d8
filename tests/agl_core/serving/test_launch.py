from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agl_core.config import ServingSettings
from agl_core.env_var import ENGINE_TOKEN
from agl_core.errors import ConfigError
from agl_core.identity import base_model
from agl_core.serving.launch import ModelServer
from agl_core.utils.threaded_server import ThreadedServer
from tests.builders import POLICY

CALCULATOR_POLICY = "examples/calculator/policy"


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


def test_an_engine_open_to_other_machines_needs_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(ENGINE_TOKEN, raising=False)
    base = base_model(CALCULATOR_POLICY).policy
    with pytest.raises(ConfigError, match=r"serving\.host 0\.0\.0\.0 is open .* AGL_ENGINE_TOKEN"):
        ModelServer.start(ServingSettings(host="0.0.0.0"), base, tmp_path)
    assert not (tmp_path / "engine.log").exists()


def test_the_token_is_asked_for_sent_and_kept_out_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(ENGINE_TOKEN, "only-for-us")
    settings = ServingSettings(advertised_host="engine.example")
    with ModelServer.start(settings, base_model(CALCULATOR_POLICY).policy, tmp_path) as server:
        assert httpx.get(f"{server.url}/policy").status_code == 401
        assert server.metrics()["requests_total"] == 0
        (advertised,) = server.advertised_urls
        assert advertised == server.url.replace("127.0.0.1", "engine.example")
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files
        assert not any(b"only-for-us" in path.read_bytes() for path in files)
    assert "only-for-us" not in (tmp_path / "engine.log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["engine.log"]
