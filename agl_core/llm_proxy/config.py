"""How the proxy serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from agl_core.errors import ConfigError
from agl_core.llm_proxy.accounts import Price
from agl_core.llm_proxy.backends import Backend
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.sampling import check_sampling_parameters
from agl_core.types.training import PolicyRef


class ModelConfig(TypedDict):
    """A model of LiteLLM's `model_list`."""

    model_name: str
    litellm_params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """How the proxy serves; holds values only.

    Raises:
        ConfigError: No model server is named, or sampling parameters cannot be that.
    """

    backend_url: str | None = None
    """Base URL of the one model server, ending in `/v1`."""
    rollout_seeds: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    """Seed of each rollout, for its calls that bring none; else a rollout is seeded by its id."""
    backend_api_key: str | None = None
    backends: tuple[Backend, ...] = ()
    """Instead of `backend_url`, where there are several."""
    policy: PolicyRef | None = None
    """What must answer; a call that other weights served is refused. None lets any answer."""
    sampling_parameters: JsonObject = field(default_factory=JsonObject)
    """For what agents leave open (`sampling` has the rule)."""
    validation_sampling_parameters: JsonObject | None = None
    """Instead, for rollouts of mode `val` or `test`; None for the same."""
    token: str | None = None
    """What agents must send as their API key; None where only this machine can connect."""
    admin_token: str | None = None
    """What opens `/admin`; None where nothing does."""
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    """By the name of the model that agents ask for; `*` is for every other one."""
    deadline_seconds: float = 600.0
    """For one call, retries included."""
    max_tries: int = 8
    max_request_bytes: int = 16 * 1024 * 1024
    request_seconds: float = 60.0
    """How long an agent may take to send a request."""
    health_seconds: float = 5.0
    """How often model servers are asked for their health, where there are several."""

    def __post_init__(self) -> None:
        if (self.backend_url is None) == (not self.backends):
            raise ConfigError("name the model server by backend_url, or several by backends")
        for name in ("token", "admin_token"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty, which anyone could send; None asks for none")
        self.sampling_for("train")
        self.sampling_for("val")

    def all_backends(self) -> tuple[Backend, ...]:
        """Return the model servers."""
        if self.backend_url is None:
            return self.backends
        return (Backend(self.backend_url, self.backend_api_key),)

    def sampling_for(self, mode: str | None) -> JsonObject:
        """Return the sampling parameters of a mode, as fields of a request.

        Args:
            mode: Of the rollout, `train`, `val` or `test`; None counts as `train`.

        Raises:
            ConfigError: They cannot be that.
        """
        others = self.validation_sampling_parameters
        is_other = mode in ("val", "test") and others is not None
        return check_sampling_parameters(
            others if is_other and others is not None else self.sampling_parameters
        )
