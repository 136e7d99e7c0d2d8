"""The only reader of the project's environment variables."""

import os
from enum import StrEnum

from pydantic import SecretStr

from agl_core.errors import ConfigError

ENGINE_TOKEN = "AGL_ENGINE_TOKEN"
STORE_TOKEN = "AGL_STORE_TOKEN"

_LOCAL = ("127.0.0.1", "localhost", "::1")
_EVERY_ADDRESS = ("", "0.0.0.0", "::")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class LightningEnvVar(StrEnum):
    """Variables that set what arguments leave open."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    """Whether every emitted span is logged."""
    AGL_FLAT_MESSAGES = "AGL_FLAT_MESSAGES"
    """Whether spans of model calls also have `gen_ai.prompt.N.*`, `gen_ai.completion.N.*` and
    `prompt_token_ids`, which Agent Lightning's adapters read; false unless set."""
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    """Whether the trainer wraps the store for its execution strategy; true unless set."""
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    """`algorithm`, `runner` or `both`."""
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"


def resolve_bool_env_var(
    var: str, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Return the override, else the variable, else the fallback.

    Raises:
        ValueError: The variable is neither true (1, true, yes, on) nor false (0, false, no, off).
    """
    if override is not None:
        return override
    text = os.environ.get(var)
    if text is None:
        return fallback
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ValueError(f"{var} must be one of {', '.join((*_TRUE, *_FALSE))}; got {text!r}")


def resolve_int_env_var(
    var: str, override: int | None = None, fallback: int | None = None
) -> int | None:
    """Return the override, else the variable, else the fallback.

    Raises:
        ValueError: The variable is no integer.
    """
    if override is not None:
        return override
    text = os.environ.get(var)
    if text is None:
        return fallback
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{var} must be an integer; got {text!r}") from None


def resolve_str_env_var(
    var: str, override: str | None = None, fallback: str | None = None
) -> str | None:
    """Return the override, else the variable, else the fallback."""
    return override if override is not None else os.environ.get(var, fallback)


def bypass_proxies(host: str = "") -> None:
    """Keep requests to this machine away from the HTTP proxy that the environment names.

    Adds the loopback addresses to `NO_PROXY`, which every client library and every process started
    from here reads: Prefect's client, botocore, an agent's OpenAI client. Clients read it when they
    are made, so call this before agents are imported. Without a proxy nothing is changed.

    Args:
        host: A further address of this machine that a server of ours listens on.
    """
    names = ("http_proxy", "https_proxy", "all_proxy")
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in names):
        return
    ours = [*_LOCAL, *([host] if host not in _EVERY_ADDRESS else [])]
    for name in ("no_proxy", "NO_PROXY"):  # some clients read one, some the other
        text = os.environ.get(name) or os.environ.get(name.swapcase()) or ""
        hosts = [part.strip() for part in text.split(",") if part.strip()]
        if "*" not in hosts:
            os.environ[name] = ",".join(dict.fromkeys([*hosts, *ours]))


def engine_token() -> SecretStr | None:
    """Return the bearer token of the model engine, or None where none is set.

    Raises:
        ConfigError: It cannot be sent.
    """
    return _sendable(os.environ.get(ENGINE_TOKEN), "the engine's token (AGL_ENGINE_TOKEN)")


def engine_key() -> str | None:
    """Return the same token in clear, as the API key of the engine's clients."""
    token = engine_token()
    return token.get_secret_value() if token else None


def store_token(override: SecretStr | str | None = None) -> SecretStr | None:
    """Return the override, else the bearer token of the store's server, or None where none is
    set.

    Raises:
        ConfigError: It cannot be sent.
    """
    if isinstance(override, SecretStr):
        override = override.get_secret_value()
    return _sendable(override or os.environ.get(STORE_TOKEN), "the store's token")


def _sendable(token: str | None, what: str) -> SecretStr | None:
    """Return a token that can be a header; HTTP clients repeat one that cannot in their errors."""
    if not token:
        return None
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{what} must be printable ASCII without spaces")
    return SecretStr(token)


def named_secret(name: str | None) -> str | None:
    """Return the value of a variable that an option names, or None where it names none.

    Raises:
        ConfigError: It is not set.
    """
    if name is None:
        return None
    if not (value := os.environ.get(name)):
        raise ConfigError(f"the variable {name} is not set")
    return value
