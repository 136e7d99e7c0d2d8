import os

import pytest

from agl_core.env_var import (
    ENGINE_TOKEN,
    STORE_TOKEN,
    LightningEnvVar,
    bypass_proxies,
    engine_token,
    resolve_bool_env_var,
    resolve_int_env_var,
    resolve_str_env_var,
    store_token,
)
from agl_core.errors import ConfigError

PORT, HOST = LightningEnvVar.AGL_SERVER_PORT, LightningEnvVar.AGL_SERVER_HOST
MANAGED = LightningEnvVar.AGL_MANAGED_STORE


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for var in LightningEnvVar:
        monkeypatch.delenv(var, raising=False)


@pytest.mark.parametrize(
    ("resolve", "var", "text", "value", "override"),
    [
        (resolve_bool_env_var, MANAGED, "off", False, True),
        (resolve_int_env_var, PORT, "80", 80, 0),
        (resolve_str_env_var, HOST, "a", "a", ""),
    ],
)
def test_the_override_wins_then_the_variable_then_the_fallback(
    monkeypatch, resolve, var, text, value, override
):
    assert resolve(var) is None
    assert resolve(var, fallback=override) == override
    monkeypatch.setenv(var, text)
    assert resolve(var, fallback=override) == value
    assert resolve(var, override=override, fallback=value) == override


@pytest.mark.parametrize("text", ["1", "true", "YES", " On "])
def test_truth_has_four_words(monkeypatch, text):
    monkeypatch.setenv(MANAGED, text)
    assert resolve_bool_env_var(MANAGED) is True


@pytest.mark.parametrize("text", ["0", "False", "no", "off"])
def test_so_does_falsehood(monkeypatch, text):
    monkeypatch.setenv(MANAGED, text)
    assert resolve_bool_env_var(MANAGED) is False


def test_other_words_are_refused(monkeypatch):
    monkeypatch.setenv(MANAGED, "maybe")
    monkeypatch.setenv(PORT, "http")
    with pytest.raises(ValueError, match=r"AGL_MANAGED_STORE must be one of 1, true.*'maybe'"):
        resolve_bool_env_var(MANAGED)
    with pytest.raises(ValueError, match="AGL_SERVER_PORT must be an integer"):
        resolve_int_env_var(PORT)


def test_without_a_proxy_nothing_is_set(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    bypass_proxies("10.0.0.1")
    assert "NO_PROXY" not in os.environ


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1,localhost,::1,10.0.0.1"),
        ({"NO_PROXY": "a.example, localhost"}, "a.example,localhost,127.0.0.1,::1,10.0.0.1"),
        ({"no_proxy": "b.example"}, "b.example,127.0.0.1,localhost,::1,10.0.0.1"),
        ({"NO_PROXY": "*", "no_proxy": "*"}, "*"),
    ],
)
def test_this_machine_is_added_to_what_bypasses_the_proxy(monkeypatch, before, after):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"HTTPS_PROXY": "http://proxy:1", **before}.items():
        monkeypatch.setenv(name, value)
    for host in ("", "0.0.0.0", "10.0.0.1", "10.0.0.1"):
        bypass_proxies(host)
    assert (os.environ["NO_PROXY"], os.environ["no_proxy"]) == (after, after)


@pytest.mark.parametrize(
    ("name", "read"), [(ENGINE_TOKEN, engine_token), (STORE_TOKEN, store_token)]
)
@pytest.mark.parametrize("token", ["hunter2\n", "hunter 2", "hünter2"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name, read, token: str
):
    monkeypatch.setenv(name, token)
    with pytest.raises(ConfigError, match="must be printable ASCII without spaces") as caught:
        read()
    assert "nter" not in str(caught.value)
