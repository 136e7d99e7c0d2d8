"""Our own section of the configuration, `agentlightning`, and the batch that it asks for."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from agl_core.algorithm.verl.keys import OURS
from agl_core.errors import ConfigError
from agl_core.sampling import deviations
from agl_core.trajectory.settings import BatchSettings

DEFAULTS: dict[str, Any] = {
    "port": 9999,
    "trace_aggregator": {
        "level": "transition",
        "trajectory_max_prompt_length": 2048,
        "trajectory_max_response_length": 8192,
        "debug": False,
        "mismatch_log_dir": "./mismatch_cases",
    },
    "truncation": {"prompt": "drop", "response": "drop", "unfinished": "keep"},
    "credit": {"assignment": "final", "discount": 1.0, "reward_weights": {}},
    "filter": {"equal_rewards": False, "on_empty": "fail"},
    "sampling": {"allow": []},
    "loss": {"per_rollout": False},
}
"""Agent Lightning's keys with its defaults, then ours; see `BatchSettings` for their values."""

_KEYS: dict[str, str] = {
    "level": OURS + "trace_aggregator.level",
    "prompt_truncation": OURS + "truncation.prompt",
    "response_truncation": OURS + "truncation.response",
    "unfinished": OURS + "truncation.unfinished",
    "credit": OURS + "credit.assignment",
    "discount": OURS + "credit.discount",
    "reward_weights": OURS + "credit.reward_weights",
    "drop_equal_rewards": OURS + "filter.equal_rewards",
    "on_empty": OURS + "filter.on_empty",
    "allowed_sampling": OURS + "sampling.allow",
}
"""The key of each setting of the batch."""


def row_limits(config: DictConfig) -> tuple[int, int]:
    """Return the most prompt and response tokens of a row at the configured level."""
    aggregator = config.agentlightning.trace_aggregator
    if aggregator.level == "trajectory":
        return (aggregator.trajectory_max_prompt_length, aggregator.trajectory_max_response_length)
    return config.data.max_prompt_length, config.data.max_response_length


def sampling_fields(section: DictConfig) -> dict[str, float]:
    """Return the fields of a request that cut the distribution, for `rollout` or its
    `val_kwargs`.
    """
    return deviations({"top_p": section.top_p, "top_k": section.top_k})


def batch_settings(config: DictConfig, min_group_size: int) -> BatchSettings:
    """Return the rules of the batch.

    Args:
        config: Composed configuration.
        min_group_size: Rollouts; 1 where the estimator compares nothing.

    Raises:
        ConfigError: A value is not one of a key's; every such key is named.
    """
    limits = row_limits(config)
    values = {name: OmegaConf.select(config, key) for name, key in _KEYS.items()}
    weights = values["reward_weights"]
    values["reward_weights"] = OmegaConf.to_container(weights) if weights else None
    allowed = values["allowed_sampling"]
    values["allowed_sampling"] = OmegaConf.to_container(allowed) if allowed else ()
    try:
        return BatchSettings(
            max_prompt_length=limits[0],
            max_response_length=limits[1],
            min_group_size=min_group_size,
            temperature=float(config.actor_rollout_ref.rollout.temperature),
            sampling=sampling_fields(config.actor_rollout_ref.rollout),
            **values,
        )
    except ValidationError as error:
        problems = [
            f"{_KEYS.get(str(p['loc'][0]), OURS + str(p['loc'][0])) if p['loc'] else OURS[:-1]}: "
            f"{p['msg']}"
            for p in error.errors()
        ]
        raise ConfigError("VERL config: " + "; ".join(problems)) from error
