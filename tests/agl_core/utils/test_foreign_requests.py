"""Store, proxy, engine and vLLM's middleware ask the same questions of a request."""

import pytest

from agl_core.serving.vllm.policy_middleware import Failure, _check_origin
from agl_core.utils.foreign_requests import find_foreign


def is_refused_by_vllm(headers: dict[str, str]) -> bool:
    try:
        _check_origin(headers)
    except Failure as failure:
        return failure.status == 403
    return False


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "page.example:80"},
        {},
        {"host": "localhost:1", "origin": "http://page.example"},
        {"host": "localhost:1", "origin": "null", "content-type": "text/plain"},
        {"host": "localhost:1", "origin": "http://["},
        {"host": "localhost:1", "sec-fetch-site": "cross-site"},
        {"host": "localhost.page.example"},
    ],
)
def test_what_a_foreign_page_sends_is_refused(headers: dict[str, str]):
    assert find_foreign(headers)
    assert is_refused_by_vllm(headers)


@pytest.mark.parametrize(
    "host", ["localhost:1", "LOCALHOST", "127.0.0.1:80", "[::1]:5", "127.0.0.2"]
)
def test_names_of_this_machine_are_served(host: str):
    for headers in ({"host": host}, {"host": host, "origin": "http://localhost:3000"}):
        assert find_foreign(headers) is None
        assert not is_refused_by_vllm(headers)
