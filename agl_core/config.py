"""The configuration of a run: what to train, on which data, with which agent, and where to keep
the record.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from agl_core.errors import ConfigError
from agl_core.failures import FailureSettings
from agl_core.settings import Settings as _Settings

_SECRET = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/@\s]+@"
    r"|[a-z]+://\S*[?&](sig|auth|[\w.-]*(signature|token|secret|password|api[_-]?key))=",
    re.IGNORECASE,
)
_RUN_ID_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"

_SECRET_NAME = re.compile(r"(TOKEN|_KEY|APIKEY|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
"""Of environment variables, as HF_TOKEN and AWS_SECRET_ACCESS_KEY."""


def check_run_id(run_id: str) -> str:
    """Return the id, or raise.

    Raises:
        ValueError: It cannot stand in every store's keys and in Prefect's names.
    """
    if not re.fullmatch(_RUN_ID_PATTERN, run_id):
        raise ValueError(
            f"run id {run_id!r:.80}: use up to 63 lowercase letters, digits and dashes, "
            "a letter or a digit first"
        )
    return run_id


SettingsT = TypeVar("SettingsT", bound=_Settings)


_MOVED = {
    "max_attempts": "failures.<kind>.attempts",
    "retry": "failures.<kind>.attempts (1 for a kind that is not tried again)",
    "retry_delay_seconds": "failures.<kind>.delay_seconds",
}
"""Former settings of `rollout`, and where each is now."""


class RolloutSettings(_Settings):
    """How rollouts run."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Deadline of one attempt."""
    concurrency: int = Field(default=32, ge=1)
    """Rollouts at once in one shard."""
    shard_size: int | None = Field(default=None, ge=1, le=4096)
    """Rollouts of one shard; None sizes shards by what earlier ones took."""
    max_shards: int = Field(default=32, ge=1)
    """Shards of one set on a work pool at once, at most; give what its workers can run."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Rollouts at once over all shards, as many as the model server bears; None for `concurrency`
    in each shard."""
    deployment: str | None = None
    """Deployment of the flow `rollout-shard` that runs the shards on its work pool, for example
    `rollout-shard/rollout-shard`; None runs them in the training process."""
    startup_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long a shard on a work pool may wait for a worker and start."""
    flush_seconds: float = Field(default=5.0, gt=0)
    """A shard writes what it finished at least this often ..."""
    flush_rollouts: int = Field(default=32, ge=1)
    """... or after this many rollouts, whichever is first."""
    max_leaked_threads: int = Field(default=8, ge=0)
    """Sync agents past their deadline that may still run before the shard stops."""
    isolation: Literal["none", "process"] = "none"
    """`process` runs each agent in a process of its own, which is killed at the deadline, whatever
    the agent does then; up to `concurrency` processes in a shard."""

    @model_validator(mode="before")
    @classmethod
    def _names_the_new_place(cls, values: Any) -> Any:
        for name, place in _MOVED.items():
            if isinstance(values, dict) and name in values:
                raise ValueError(f"{name} is set for each kind of failure now: {place}")
        return values


class VllmSettings(_Settings):
    """A vLLM server that the run starts, in an environment of its own."""

    python: str
    """Interpreter of the environment that has vLLM, for example `.venv-vllm/bin/python`."""
    args: tuple[str, ...] = ()
    """More arguments of vLLM's OpenAI server, for example `--max-model-len`, `2048`."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables of it, which become part of the run's record; it has those of the
    run's own process too."""

    @field_validator("env")
    @classmethod
    def _has_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        if secret := next(filter(_SECRET_NAME.search, env), None):
            raise ValueError(
                f"{secret} would become part of the run's record; set it in the environment of "
                "the run's process, which vLLM gets too"
            )
        return env


class ServingSettings(_Settings):
    """Where the policy is served."""

    url: str | tuple[str, ...] | None = None
    """Address of a running model server, or of several that share the load; None starts one for
    the run."""
    host: str = "127.0.0.1"
    """Address that the engine which the run starts listens on. Any but loopback needs a token in
    `AGL_ENGINE_TOKEN`, here and where shards run."""
    advertised_host: str | None = None
    """Name by which shards on other machines reach the engine; None for `host`."""
    vllm: VllmSettings | None = None
    """Start vLLM instead of the embedded engine."""
    max_batch_size: int = Field(default=64, ge=1)
    """Of the embedded engine."""
    device: str = "cpu"
    """Where the embedded engine computes, as torch names it."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine that the run starts."""
    startup_timeout_seconds: float = Field(default=180.0, gt=0)

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the servers that run already, without a slash at the end; may be none."""
        named = (self.url,) if isinstance(self.url, str) else self.url or ()
        return tuple(url.rstrip("/") for url in named)

    @model_validator(mode="after")
    def _names_addresses(self) -> Self:
        if self.url is not None and not self.urls:
            raise ValueError("url names no model server; leave it out to have one started")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url {url!r} does not begin with http:// or https://")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("url names a model server twice")
        return self

    @model_validator(mode="after")
    def _starts_an_engine(self) -> Self:
        fields = {name: f for name, f in type(self).model_fields.items() if name != "url"}
        changed = [name for name, f in fields.items() if getattr(self, name) != f.default]
        if self.url is not None and changed:
            raise ValueError(
                f"{', '.join(changed)}: only for an engine that the run starts; url "
                "names one that runs already"
            )
        own = ("max_batch_size", "device", "threads")
        if self.vllm is not None and (named := [name for name in own if name in changed]):
            raise ValueError(
                f"{', '.join(named)}: of the embedded engine; vLLM takes arguments in vllm.args"
            )
        return self


class PreflightSettings(_Settings):
    """What a run tries before its first iteration, beyond reading and comparing."""

    canary: bool = True
    """Run one rollout first, where the others will run; its result is kept apart and unused."""


class S3Settings(_Settings):
    """How an `s3://` ledger and `s3://` datasets are reached, where the environment does not say.

    Names only: this is part of flow parameters and of the run's record.
    """

    endpoint_url: str | None = Field(default=None, pattern=r"^https?://[^@\s]+$")
    region: str | None = Field(default=None, pattern=r"^[a-z0-9-]+$")
    credentials: str | None = Field(
        default=None, pattern=r"^(aws|minio)-credentials/[a-z0-9][a-z0-9-]*$"
    )
    """Prefect block with the credentials, `aws-credentials/NAME` or `minio-credentials/NAME`; it
    may also name endpoint and region. None uses `AWS_ACCESS_KEY_ID` and its like."""


class AlgorithmSettings(_Settings):
    """What learns from the rollouts."""

    type: str = Field(default="verl", pattern=r"^(verl|baseline|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """`verl`; `baseline`, which only scores; or `package.module:Class` of an
    `IterativeAlgorithm`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Of `verl`: VERL's own keys (of `ppo_trainer`), nested or dotted, where they differ from its
    defaults. Of others: the arguments of the class."""


class RunConfig(_Settings):
    """One training campaign. Relative paths are relative to the working directory."""

    run_id: Annotated[str, AfterValidator(check_run_id)] = Field(
        json_schema_extra={"pattern": _RUN_ID_PATTERN}
    )
    """Name of the run in the ledger and in Prefect: lowercase letters, digits, dashes."""
    ledger: str
    """A local folder, or `s3://bucket/prefix`."""
    s3: S3Settings = S3Settings()
    agent: str
    """The agent function, `package.module:name`."""
    train_data: str
    """JSON Lines file; each row is one task."""
    val_data: str | None = None
    """JSON Lines file of the validation set; None validates nothing."""
    algorithm: AlgorithmSettings
    seed: int = Field(default=1, ge=0)
    rollout: RolloutSettings = RolloutSettings()
    failures: FailureSettings = FailureSettings()
    """What follows a failed rollout."""
    serving: ServingSettings = ServingSettings()
    preflight: PreflightSettings = PreflightSettings()
    min_group_size: int | None = Field(default=None, ge=1)
    """Groups with fewer finished rollouts are filtered: an advantage needs something to compare
    with. None takes what the algorithm needs; fewer are refused.
    """
    max_automatic_starts: int = Field(default=5, ge=0)
    """Starts by automations in a row, without a newly committed iteration between them, before
    one is refused."""
    pass_reward: float = 1.0
    """A rollout passes where its reward is at least this."""
    control: Literal["none", "shuffled_rewards"] = "none"
    """`shuffled_rewards` deals each iteration's rewards out at random before learning: a run that
    still improves learns from something else than its reward. Validation keeps the true rewards."""

    @model_validator(mode="before")
    @classmethod
    def _names_no_secrets(cls, values: Any) -> Any:
        if found := _find_secret(values, ""):
            raise ValueError(
                f"{found}: a URL with a user, password or token in it would become part of the "
                "run's record; leave that out, and give credentials by the environment, a Prefect "
                "block (s3.credentials), or a proxy in front of the server"
            )
        return values

    @model_validator(mode="after")
    def _reaches_something(self) -> Self:
        if self.s3 != S3Settings() and not self.ledger.startswith("s3://"):
            raise ValueError(f"s3: settings of an s3:// ledger; this one is {self.ledger}")
        return self


def _find_secret(value: Any, place: str) -> str | None:
    """Return the place of the first URL that carries credentials."""
    if isinstance(value, Mapping):
        items = [(f"{place}.{name}" if place else str(name), item) for name, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{place}[{number}]", item) for number, item in enumerate(value)]
    else:
        return place if isinstance(value, str) and _SECRET.search(value) else None
    return next((found for name, item in items if (found := _find_secret(item, name))), None)


def check_settings(kind: type[SettingsT], values: dict[str, Any]) -> SettingsT:
    """Return these settings as a model of their kind.

    Raises:
        ConfigError: Settings are unknown, missing or wrong; the message names each.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = (_problem(kind, p["loc"], p["type"], p["msg"]) for p in error.errors())
        raise ConfigError("; ".join(problems)) from error


def _problem(kind: type[BaseModel], place: tuple[int | str, ...], error: str, text: str) -> str:
    """Return one problem in words, with the setting that was probably meant."""
    name = ".".join(map(str, place))
    text = text.removeprefix("Value error, ")
    if not name:  # of the whole, whose text names the setting
        return text
    if error != "extra_forbidden":
        return f"{name}: {text}"
    for part in place[:-1]:
        field = kind.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type):
            return f"unknown setting {name!r}"
        kind = field.annotation
    fields = kind.model_fields if issubclass(kind, BaseModel) else {}
    meant = difflib.get_close_matches(str(place[-1]), fields, n=1)
    return f"unknown setting {name!r}" + (f"; did you mean {meant[0]!r}?" if meant else "")
