import pytest

from agl_core.llm_proxy.attribution import Attribution, find_attribution, find_kind
from agl_core.llm_proxy.refusal import Refusal
from tests.agl_core.llm_proxy.test_app import MESSAGES, running

BOTH = {"x-rollout-id": "ro-2", "x-attempt-id": "at-2"}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "chat/completions"),
        ("/rollout/r/attempt/a/v1/messages", "messages"),
        ("/rollout/r/attempt/a/v1/v1/messages", "messages"),
        ("/rollout/r/attempt/a/responses", "responses"),
        ("/mode/val/rollout/r/attempt/a/v1/completions", "completions"),
        ("/rollout/r/v1/completions", None),
        ("/", None),
    ],
)
def test_kind_of_a_path(path, kind):
    assert find_kind(path) == kind


def test_path_wins_over_headers():
    path = "/mode/val/rollout/ro-1/attempt/at-1/v1/chat/completions"
    headers = {**BOTH, "x-rollout-mode": "train"}
    assert find_attribution(path, headers) == Attribution("ro-1", "at-1", "val")
    found = find_attribution("/v1/chat/completions", headers)
    assert found == Attribution("ro-2", "at-2", "train")


@pytest.mark.parametrize("headers", [{}, {"x-rollout-id": "ro-2"}])
def test_call_without_an_attempt_is_refused(headers):
    with pytest.raises(Refusal, match="belongs to no attempt"):
        find_attribution("/v1/chat/completions", headers)


def test_calls_by_headers_are_recorded():
    with running() as setup:
        headers = {"x-rollout-id": "ro-1", "x-attempt-id": "at-1"}
        body = {"model": "m", "messages": MESSAGES}
        response = setup.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200
        assert setup.last_call().status.is_ok
