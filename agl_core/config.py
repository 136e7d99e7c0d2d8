"""The configuration of a run: what to train, on which data, with which agent, and where to keep
the record.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agl_core.types.outcome import FailureKind


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RolloutSettings(_Settings):
    """How rollouts run."""

    timeout_seconds: float = Field(default=120.0, gt=0)
    """Deadline of one attempt."""
    max_attempts: int = Field(default=2, ge=1)
    """Tries of one rollout; only the kinds in `retry` are tried again."""
    retry: tuple[FailureKind, ...] = (FailureKind.INFRA_ERROR, FailureKind.TIMEOUT)
    """Kinds of failure that another attempt may get right."""
    retry_delay_seconds: float = Field(default=1.0, ge=0)
    concurrency: int = Field(default=32, ge=1)
    """Rollouts at once in one shard."""
    shard_size: int = Field(default=512, ge=1, le=4096)
    """Rollouts of one shard."""
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


class ServingSettings(_Settings):
    """Where the policy is served."""

    url: str | None = None
    """Address of a running engine server; None starts one for the run."""
    host: str = "127.0.0.1"
    """Address that the engine which the run starts listens on. Any but loopback needs a token in
    `AGL_ENGINE_TOKEN`, here and where shards run."""
    advertised_host: str | None = None
    """Name by which shards on other machines reach the engine; None for `host`."""
    max_batch_size: int = Field(default=64, ge=1)
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine that the run starts."""
    startup_timeout_seconds: float = Field(default=180.0, gt=0)


class VerlSettings(_Settings):
    """Reinforcement learning by VERL."""

    type: Literal["verl"] = "verl"
    config: dict[str, Any]
    """VERL's own keys (of `ppo_trainer`), nested or dotted, where they differ from its defaults."""


class RunConfig(_Settings):
    """One training campaign. Relative paths are relative to the working directory."""

    run_id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Name of the run in the ledger and in Prefect: lowercase letters, digits, dashes."""
    ledger: str
    """A local folder, or `s3://bucket/prefix`."""
    agent: str
    """The agent function, `package.module:name`."""
    train_data: str
    """JSON Lines file; each row is one task."""
    val_data: str | None = None
    """JSON Lines file of the validation set; None validates nothing."""
    algorithm: VerlSettings
    seed: int = 1
    rollout: RolloutSettings = RolloutSettings()
    serving: ServingSettings = ServingSettings()
    min_group_size: int = Field(default=2, ge=2)
    """Groups with fewer finished rollouts are filtered: an advantage needs something to compare
    with.
    """
    pass_reward: float = 1.0
    """A rollout passes where its reward is at least this."""
    control: Literal["none", "shuffled_rewards"] = "none"
    """`shuffled_rewards` deals each iteration's rewards out at random before learning: a run that
    still improves learns from something else than its reward. Validation keeps the true rewards."""
