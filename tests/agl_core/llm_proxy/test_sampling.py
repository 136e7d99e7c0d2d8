import pytest

from agl_core.errors import ConfigError
from agl_core.llm_proxy import Backend, ProxyConfig
from agl_core.llm_proxy.sampling import check_sampling_parameters, fill_in, find_unsupported
from tests.agl_core.llm_proxy.test_app import running

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
