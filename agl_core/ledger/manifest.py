"""The manifest of an iteration: written last; if it exists, the iteration is complete.

What it says splits in two. The *content digest* covers what was learned from what (datasets,
triplets, batch columns, drop reasons, update metrics, weights): two runs that did the same have the
same one. Times, attempts, hosts and Prefect's ids stand in `observed`, outside it.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agl_core.types.outcome import CallCoverage, Coverage, RowCoverage, TokenCoverage
from agl_core.types.training import FileRef, PolicyRef


class RewardSummary(BaseModel):
    """Rewards of a set of rollouts; failed rollouts have none and are counted apart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expected: int
    rewarded: int
    """Rollouts that gave a reward; the means below are over these."""
    mean_reward: float | None
    pass_rate: float | None
    """Share with at least the configured `pass_reward`."""
    annotations: dict[str, float]
    """Mean of each number that agents noted, over the rollouts that noted it."""
    failures: dict[str, int]
    """Rollouts whose last attempt did not succeed, by kind."""
    attempts: dict[str, int] = {}
    """Attempts by how they ended; a rollout that was tried again has several."""
    policy_version: str


class Cost(BaseModel):
    """What an iteration used; failed attempts are part of it and stated apart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_calls: int
    prompt_tokens: int
    completion_tokens: int
    failed_attempts: int
    failed_attempt_tokens: int
    stage_seconds: dict[str, float]


class Difference(BaseModel):
    """One thing that a start found otherwise than it is recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.was!r}, now {self.now!r}"


class Manifest(BaseModel):
    """One committed iteration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1, 2] = 2
    """Version 1 named no earlier files."""
    run_id: str
    iteration: int
    identity: dict[str, Any]
    """Config, seed, dataset digests, base model with licence, tokenizer and chat template, code,
    packages.
    """
    changed: tuple[Difference, ...] = ()
    """What starts up to this iteration were allowed to change, oldest first."""
    policy_in: PolicyRef
    policy_out: PolicyRef | None
    """None where nothing was learned."""
    state: dict[str, Any]
    """The algorithm's state after this iteration; the next one starts from it."""
    coverage: Coverage
    rows: RowCoverage
    calls: CallCoverage | None = None
    """Model calls of the training rollouts that ended with a reward; None in manifests of before
    they were counted."""
    tokens: TokenCoverage | None = None
    """Of the training rollouts; None in manifests of before it was counted."""
    breaks: dict[str, int] = {}
    """Calls that started a row though their rollout had one, by kind; see
    `agl_core.trajectory.breaks`.
    """
    rewards: RewardSummary
    """Of the training rollouts, sampled from `policy_in`."""
    validation: dict[str, RewardSummary]
    """Of validation rollouts, by policy version."""
    update: dict[str, float]
    """Update metrics, each the mean over the optimizer steps."""
    cost: Cost
    files: tuple[FileRef, ...]
    """Every file of the iteration, superseded tries included."""
    earlier: tuple[FileRef, ...] = ()
    """Files of the run that were there before: its identity and changes, datasets, code, starts and
    their ends, and the manifest of the iteration before. So each manifest vouches for those before
    it.
    """
    content_digest: str
    observed: dict[str, Any]
    """Times, hosts, tries, the start that committed it, Prefect ids."""
