"""The settings of a run that an algorithm drives itself: those of `run.yaml` that mean something
there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from agl_core.config import RunConfig, check_settings
from agl_core.errors import ConfigError

LEDGER = ".agl/ledger"
UNKNOWN_AGENT = "of the runners"
IN_MEMORY = "in memory"
_GIVEN = ("agent", "train_data", "val_data", "algorithm", "min_group_size")
"""Of a run's settings, what the algorithm, its trainer and the arguments of `run` say."""
_OF_SHARDS = (
    "shard_size",
    "max_shards",
    "max_in_flight",
    "deployment",
    "flush_rollouts",
    "isolation",
)
OF_RUNNERS = ("concurrency", "max_leaked_threads")
"""Settings of `rollout` that whoever makes the runners may honour."""


def check_run_settings(settings: Mapping[str, Any] | RunConfig) -> None:
    """Return if an algorithm can be run with these settings.

    Raises:
        ConfigError: They are unknown or wrong, or would be ignored; the message names each.
    """
    if isinstance(settings, RunConfig):
        _refuse_ignored(settings, honoured=OF_RUNNERS)
        return
    if given := [name for name in _GIVEN if name in settings]:
        raise ConfigError(f"run.{given[0]}: what is run says that, not the settings of the run")
    _refuse_ignored(_with_placeholders(settings), honoured=())


def _with_placeholders(settings: Mapping[str, Any]) -> RunConfig:
    algorithm = {"type": "verl", "config": {}}
    names = {"agent": UNKNOWN_AGENT, "train_data": IN_MEMORY, "run_id": "x", "ledger": LEDGER}
    return check_settings(RunConfig, {"algorithm": algorithm, **names, **settings})


def _refuse_ignored(config: RunConfig, honoured: Sequence[str]) -> None:
    rollout = type(config.rollout).model_fields
    ignored = [
        f"rollout.{name}"
        for name in (*_OF_SHARDS, *OF_RUNNERS)
        if name not in honoured and getattr(config.rollout, name) != rollout[name].default
    ]
    if _sets(config, "preflight", "canary") and config.preflight.canary:
        ignored.append("preflight.canary")
    if config.max_automatic_starts != type(config).model_fields["max_automatic_starts"].default:
        ignored.append("max_automatic_starts")
    if config.s3.credentials is not None:
        ignored.append("s3.credentials")
    if ignored:
        raise ConfigError(
            f"{', '.join(ignored)}: of the pipeline (agl run), and nothing to an algorithm that is "
            "run over a store; leave it out"
        )


def _sets(config: RunConfig, group: str, name: str) -> bool:
    found: BaseModel = getattr(config, group)
    return group in config.model_fields_set and name in found.model_fields_set
