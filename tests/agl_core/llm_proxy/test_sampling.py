import json
from typing import Any

import pytest

from agl_core import semconv
from agl_core.errors import ConfigError
from agl_core.llm_proxy import Backend, ProxyConfig
from agl_core.llm_proxy.sampling import check_sampling_parameters, fill_in, find_unsupported
from agl_core.sampling import NEUTRAL
from tests.agl_core.llm_proxy.replay import TEXT, replaying
from tests.agl_core.llm_proxy.test_app import running
from tests.agl_core.llm_proxy.test_completions import ONE
from tests.agl_core.llm_proxy.test_messages import client as anthropic_client

HELLO: Any = [{"role": "user", "content": "hi"}]

RESOURCE = {"temperature": 0.7, "max_tokens": 20, "extra_body": {"top_k": 5}}


def test_what_the_agent_sends_holds_and_the_rest_is_the_resources():
    defaults = check_sampling_parameters(RESOURCE)
    assert defaults == {"temperature": 0.7, "max_tokens": 20, "top_k": 5}
    assert fill_in({"temperature": 0, "top_k": None}, defaults) == {
        "temperature": 0,
        "max_tokens": 20,
        "top_k": 5,
    }
    limited = {"max_completion_tokens": 3}
    assert "max_tokens" not in fill_in(limited, defaults)


@pytest.mark.parametrize("name", ["model", "messages", "stream", "tools"])
def test_sampling_parameters_set_nothing_else(name):
    with pytest.raises(ConfigError, match=f"cannot set {name}"):
        check_sampling_parameters({name: 1})
    with pytest.raises(ConfigError, match="use_beam_search"):
        ProxyConfig("http://a/v1", sampling_parameters={"use_beam_search": True})


def test_one_way_to_name_model_servers():
    with pytest.raises(ConfigError, match="backend_url"):
        ProxyConfig()
    with pytest.raises(ConfigError, match="backend_url"):
        ProxyConfig("http://a/v1", backends=(Backend("http://b/v1"),))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 0}, "n=0"),
        ({"n": True}, "n=True"),
        ({"n": 1000}, "n=1000"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "beam search"),
        ({"stream_options": "usage"}, "stream_options"),
        ({"temperature": "0.3"}, "temperature='0.3' is not a number"),
        ({"top_p": True}, "top_p=True is not a number"),
        ({"max_tokens": "16"}, "max_tokens='16' is not a number"),
    ],
)
def test_what_cannot_be_recorded_is_named(body, words):
    assert words in find_unsupported(body)


def test_mode_of_the_path_or_of_a_header_chooses_the_parameters():
    validation = {"temperature": 0.0}
    with running(
        sampling_parameters={"temperature": 0.7}, validation_sampling_parameters=validation
    ) as setup:
        path = "/rollout/ro-1/attempt/at-1/v1/chat/completions"
        body = {"model": "m", "messages": []}
        for prefix in ("", "/mode/train", "/mode/val", "/mode/test"):
            assert setup.client.post(prefix + path, json=body).status_code == 200
        headers = {"x-rollout-mode": "val"}
        assert setup.client.post(path, json=body, headers=headers).status_code == 200
        assert setup.client.post("/mode/odd" + path, json=body).status_code == 400
        temperatures = [asked["temperature"] for asked in setup.server.requests]
        url = setup.proxy.as_resource("m", mode="val").get_base_url("ro-1", "at-1")
        assert setup.client.post(f"{url}/chat/completions", json=body).status_code == 200
        assert setup.server.requests[-1]["temperature"] == 0.0
    assert temperatures == [0.7, 0.7, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
def test_every_field_is_stated_and_what_differs_is_recorded_in_each_dialect(dialect):
    recording = ONE if dialect == "completions" else TEXT
    with replaying(recording, sampling_parameters={"top_p": 0.9}) as setup:
        client = setup.openai()
        if dialect == "chat":
            client.chat.completions.create(model="m", messages=HELLO, presence_penalty=0.5)
        elif dialect == "completions":
            client.completions.create(model="m", prompt="hi", presence_penalty=0.5)
        elif dialect == "responses":
            body = {"presence_penalty": 0.5}
            client.responses.create(model="m", input="hi", extra_body=body)
        else:
            anthropic_client(setup).messages.create(
                model="m", messages=HELLO, max_tokens=9, extra_body={"top_k": 5}
            )
        (asked,) = setup.server.requests
        recorded = json.loads(setup.last_call().attributes[semconv.SAMPLING])
    own = {"top_k": 5} if dialect == "messages" else {"presence_penalty": 0.5}
    assert {name: asked[name] for name in NEUTRAL} == {**NEUTRAL, "top_p": 0.9, **own}
    assert recorded == {"top_p": 0.9, **own}
