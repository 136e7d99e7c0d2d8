import pytest

from agl_core.env_var import (
    LightningEnvVar,
    resolve_bool_env_var,
    resolve_int_env_var,
    resolve_str_env_var,
)

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
