import asyncio
import errno
import http.client
import importlib
import smtplib
import socket
import urllib.error
import urllib.request
import xmlrpc.client
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from agl_core.errors import InfraError, TransientError, UpstreamError
from agl_core.runner.failure import classify_exception, describe_exception
from agl_core.types.outcome import FailureKind

INFRA, AGENT = FailureKind.INFRA_ERROR, FailureKind.AGENT_ERROR


def openai_error(status: int) -> openai.APIStatusError:
    """Return the error that a real client raises for this status."""
    client = openai.OpenAI(api_key="x", base_url="http://127.0.0.1:9/v1")
    request = client._build_request(  # the client's own HTTP library differs between versions
        openai._models.FinalRequestOptions(method="post", url="/x")
    )
    response = type(
        "Response",
        (),
        {"status_code": status, "headers": {}, "request": request, "text": "", "reason_phrase": ""},
    )()
    return client._make_status_error("scripted", body=None, response=response)


def wrapped(error: Exception) -> Exception:
    try:
        raise ValueError("the tool gave up") from error
    except ValueError as wrapper:
        return wrapper


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (openai.APIConnectionError(request=None), INFRA),
        (openai.APITimeoutError(request=None), INFRA),
        (openai_error(500), INFRA),
        (openai_error(503), INFRA),
        (openai_error(429), INFRA),
        (openai_error(408), INFRA),
        (openai_error(400), AGENT),
        (openai_error(404), AGENT),
        (httpx.ReadTimeout("slow"), INFRA),
        (httpx.ConnectError("gone"), INFRA),
        (httpx.HTTPStatusError("x", request=None, response=httpx.Response(502)), INFRA),
        (httpx.HTTPStatusError("x", request=None, response=httpx.Response(422)), AGENT),
        (UpstreamError("x"), INFRA),
        (TransientError("x"), INFRA),
        (ConnectionResetError("x"), INFRA),
        (ValueError("x"), AGENT),
        (TimeoutError("a tool's own deadline"), AGENT),
        (wrapped(UpstreamError("x")), INFRA),
        (wrapped(KeyError("x")), AGENT),
        (ExceptionGroup("g", [UpstreamError("x"), TransientError("y")]), INFRA),
        (ExceptionGroup("g", [UpstreamError("x"), ValueError("y")]), AGENT),
    ],
)
def test_kind_of_an_exception(error, kind):
    assert classify_exception(error) is kind


def test_an_exception_without_a_text_is_described():
    class Untold(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError

    assert classify_exception(Untold()) is AGENT
    assert describe_exception(Untold()) == "Untold: <its text cannot be had: ValueError>"


def test_description_is_one_line():
    assert describe_exception(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_exception(KeyError()) == "KeyError"


def raised_by(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is asked
        call()
    return caught.value


def read_from_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=0.05)


async def ask_silence_with_aiohttp() -> None:
    import aiohttp

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.05)) as session:
            await session.get(url)


async def wait_too_long() -> None:
    async with asyncio.timeout(0):
        await asyncio.sleep(1)


def read_with_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        with connection:
            connection.settimeout(0.01)
            connection.recv(1)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: urllib.request.urlopen("http://127.0.0.1:9/"), INFRA),
        (read_from_silence, INFRA),
        (read_with_a_deadline, INFRA),
        (lambda: asyncio.run(ask_silence_with_aiohttp()), INFRA),
        (lambda: socket.getaddrinfo("no.such.host.invalid", 80), INFRA),
        (lambda: urllib.request.urlopen("nonsense://x"), AGENT),
        (lambda: asyncio.run(wait_too_long()), AGENT),
        (lambda: Path("/no/such/file").read_text(), AGENT),
    ],
)
def test_kind_of_what_a_real_call_raises(call: Callable[[], object], kind: FailureKind):
    assert classify_exception(raised_by(call)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *[(OSError(getattr(errno, name), name), INFRA) for name in ("EMFILE", "EHOSTUNREACH")],
        (OSError(errno.ENOSPC, "disk full"), INFRA),
        (OSError(errno.EACCES, "denied"), AGENT),
        (TimeoutError(), AGENT),
        (http.client.IncompleteRead(b""), INFRA),
        (http.client.InvalidURL("x"), AGENT),
        (urllib.error.HTTPError("u", 503, "later", None, None), INFRA),
        (urllib.error.HTTPError("u", 404, "no", None, None), AGENT),
        (smtplib.SMTPServerDisconnected("closed"), INFRA),
        (smtplib.SMTPAuthenticationError(535, b"no"), AGENT),
        (xmlrpc.client.ProtocolError("u", 503, "later", {}), INFRA),
        (xmlrpc.client.ProtocolError("u", 404, "no", {}), AGENT),
        (RuntimeError("can't start new thread"), INFRA),
        (InfraError("the sandbox pool is empty"), INFRA),
        (wrapped(OSError(errno.EMFILE, "too many")), INFRA),
    ],
)
def test_kind_of_errors_of_the_host_and_the_standard_library(error: Exception, kind: FailureKind):
    assert classify_exception(error) is kind


@pytest.mark.parametrize(
    ("module", "name", "arguments", "kind"),
    [
        ("requests", "ConnectionError", {}, INFRA),
        ("requests", "ReadTimeout", {}, INFRA),
        ("requests.exceptions", "MissingSchema", {}, AGENT),
        (
            "requests",
            "HTTPError",
            {"response": SimpleNamespace(status_code=502, request=None)},
            INFRA,
        ),
        (
            "requests",
            "HTTPError",
            {"response": SimpleNamespace(status_code=401, request=None)},
            AGENT,
        ),
        ("urllib3.exceptions", "ProtocolError", {}, INFRA),
        ("urllib3.exceptions", "DecodeError", {}, INFRA),
        ("requests.exceptions", "ContentDecodingError", {}, INFRA),
        ("httpx", "DecodingError", {"message": "broken gzip"}, INFRA),
        ("aiohttp.http_exceptions", "BadStatusLine", {}, INFRA),
        ("aiohttp", "ServerDisconnectedError", {}, INFRA),
        ("aiohttp", "ClientPayloadError", {}, INFRA),
        (
            "aiohttp",
            "ClientResponseError",
            {"request_info": None, "history": (), "status": 503},
            INFRA,
        ),
        (
            "aiohttp",
            "ClientResponseError",
            {"request_info": None, "history": (), "status": 404},
            AGENT,
        ),
        ("botocore.exceptions", "EndpointConnectionError", {"endpoint_url": "u"}, INFRA),
        ("botocore.exceptions", "ReadTimeoutError", {"endpoint_url": "u"}, INFRA),
        (
            "botocore.exceptions",
            "ClientError",
            {
                "error_response": {"ResponseMetadata": {"HTTPStatusCode": 503}},
                "operation_name": "Get",
            },
            INFRA,
        ),
        ("anthropic", "APIConnectionError", {"request": None}, INFRA),
        ("redis.exceptions", "ConnectionError", {}, INFRA),
        ("redis.exceptions", "ResponseError", {}, AGENT),
    ],
)
def test_kind_of_a_client_librarys_error(
    module: str, name: str, arguments: dict[str, Any], kind: FailureKind
):
    try:
        error = getattr(importlib.import_module(module), name)
    except ImportError:
        pytest.skip(f"{module} is not installed")
    assert classify_exception(error(**arguments)) is kind


@pytest.mark.parametrize(("code", "kind"), [("UNAVAILABLE", INFRA), ("INVALID_ARGUMENT", AGENT)])
def test_kind_of_an_error_of_grpc(code: str, kind: FailureKind):
    grpc = pytest.importorskip("grpc")
    error = grpc.RpcError()
    error.code = lambda: getattr(grpc.StatusCode, code)
    assert classify_exception(error) is kind
