"""The only reader of the project's environment variables."""

import os

from pydantic import SecretStr

ENGINE_TOKEN = "AGL_ENGINE_TOKEN"


def engine_token() -> SecretStr | None:
    """Return the bearer token of the model engine, or None where none is set."""
    token = os.environ.get(ENGINE_TOKEN)
    return SecretStr(token) if token else None
