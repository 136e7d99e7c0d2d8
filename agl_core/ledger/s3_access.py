"""How a process reaches S3: settings that anyone may see, credentials that nobody may."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from agl_core import env_var
from agl_core.config import S3Settings
from agl_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """What a block says about a store; made outside of `agl_core`, kept in memory only."""

    key_id: str
    secret: SecretStr
    token: SecretStr | None = None
    client: dict[str, Any] = field(default_factory=dict)
    """`endpoint_url`, `region_name`, `verify`, ... of a botocore client."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of a botocore `Config`."""


@dataclass(frozen=True, slots=True)
class S3Access:
    """Settings with the credentials that they name.

    What neither says comes from the environment by the names that botocore reads
    (`AWS_ENDPOINT_URL`, `AWS_DEFAULT_REGION`, `AWS_ACCESS_KEY_ID`, ...).

    Raises:
        ConfigError: The settings name credentials that were not loaded, or say something else than
            the block.
    """

    settings: S3Settings = field(default_factory=S3Settings)
    credentials: S3Credentials | None = None

    def __post_init__(self) -> None:
        block = self.settings.credentials
        if block is not None and self.credentials is None:
            raise ConfigError(f"s3.credentials: the block {block} was not loaded in this process")
        if self.credentials is None:
            return
        for name, here in self._client_settings().items():
            there = self.credentials.client.get(name)
            if None not in (here, there) and here != there:
                raise ConfigError(f"s3: {name} is {here} in the settings, {there} in block {block}")

    @property
    def source(self) -> str:
        """Where the credentials come from, for messages."""
        block = self.settings.credentials
        return "the environment (AWS_*)" if block is None else f"the Prefect block {block}"

    @property
    def address(self) -> str:
        """Where the store is, for messages."""
        stated = self.options()["client_kwargs"].get("endpoint_url")
        return stated or "the endpoint of the environment (AWS_ENDPOINT_URL)"

    def options(self) -> dict[str, Any]:
        """Return the arguments of an `s3fs.S3FileSystem`; they hold the secret."""
        env_var.bypass_proxies()  # a store on this machine
        client = {name: here for name, here in self._client_settings().items() if here is not None}
        if self.credentials is None:
            return {"client_kwargs": client}
        token = self.credentials.token
        return {
            "key": self.credentials.key_id,
            "secret": self.credentials.secret.get_secret_value(),
            "token": token.get_secret_value() if token else None,
            "client_kwargs": self.credentials.client | client,
            "config_kwargs": self.credentials.config,
        }

    def _client_settings(self) -> dict[str, str | None]:
        return {
            "endpoint_url": self.settings.endpoint_url,
            "region_name": self.settings.region,
        }


ENVIRONMENT = S3Access()
"""Everything from the environment."""
