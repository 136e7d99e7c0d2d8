import httpx
import openai
import pytest

from agl_core.errors import TransientError, UpstreamError
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


def test_description_is_one_line():
    assert describe_exception(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_exception(KeyError()) == "KeyError"
