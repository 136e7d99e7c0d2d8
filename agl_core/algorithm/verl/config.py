"""VERL's own `ppo_trainer` configuration with a user's overrides, checked key by key.

Overrides are a dict, nested or dotted or both, with the keys of the VERL command line::

    {"data": {"train_batch_size": 16}, "actor_rollout_ref.actor.optim.lr": 1e-6}

Composing reads the installed VERL's YAML files by Hydra and loads neither VERL nor torch.
"""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from agl_core.algorithm.verl import keys
from agl_core.algorithm.verl.keys import ACTOR, ROLLOUT
from agl_core.errors import ConfigError

_ABSENT = object()


def normalise(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides as one flat dict of dotted keys.

    Raises:
        ConfigError: A key is not a string, or is set twice by different spellings.
    """
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Mapping[str, Any]) -> None:
        for name, value in node.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"VERL config: key {name!r} below {prefix!r} is not a name")
            key = prefix + name
            if isinstance(value, Mapping) and value:
                walk(key + ".", value)
            elif key in flat:
                raise ConfigError(f"VERL config: {key} is set twice")
            else:
                flat[key] = value

    walk("", overrides)
    return flat


def compose(overrides: Mapping[str, Any]) -> DictConfig:
    """Return VERL's configuration with the overrides merged, after every check that needs no data.

    Where VERL reads one key and ignores its twin, the one that the user set decides:
    `actor.grad_clip` becomes `actor.optim.clip_grad`, and `actor.clip_ratio` becomes the low and
    high bound that are not set.

    Args:
        overrides: The user's settings, nested or dotted.

    Raises:
        ConfigError: A key is unknown, or settings are refused; all refused ones are named.
    """
    flat = normalise(overrides)
    config = _defaults().copy()
    problems = []
    for key, value in flat.items():
        default = _lookup(config, key)
        try:
            flat[key] = value = _coerce(default, value)
        except ValueError as error:
            problems.append(f"{key}={value!r}: {error}")
            continue
        reason = None if _same(default, value) else keys.refusal(key, value)
        if reason is not None:
            problems.append(f"{key}={value!r}: {reason}")
    if problems:
        raise ConfigError("VERL config: " + "; ".join(problems))
    for key, value in flat.items():
        OmegaConf.update(config, key, value, merge=False)
    _settle(config, flat)
    _check_values(config)
    return config


@cache
def _defaults() -> DictConfig:
    spec = find_spec("verl")
    assert spec is not None, "hydra, which this module imports, came with VERL"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return hydra_compose("ppo_trainer")


def _lookup(config: DictConfig, key: str) -> Any:
    """Return the default value at a dotted key; `_ABSENT` below a mapping that VERL leaves open."""
    node: Any = config
    for name in key.split("."):
        if isinstance(node, DictConfig) and len(node) == 0:
            return _ABSENT
        if not isinstance(node, DictConfig) or name not in node:
            raise ConfigError(f"VERL config: unknown key {key!r}{_suggestion(config, key)}")
        node = None if OmegaConf.is_missing(node, name) else node[name]
    if isinstance(node, DictConfig) and len(node) > 0:
        raise ConfigError(f"VERL config: {key!r} is a section, not a setting")
    return node


def _suggestion(config: DictConfig, key: str) -> str:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    leaves = list(normalise(plain))
    near = get_close_matches(key, leaves, n=1, cutoff=0.8)
    if not near:  # the right name in the wrong section
        near = [leaf for leaf in leaves if leaf.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:1]
    return f"; did you mean {near[0]!r}?" if near else ""


def _coerce(default: Any, value: Any) -> Any:
    """Return the value in the default's type; YAML 1.1 reads `1e-6` as a string."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
    elif isinstance(default, int | float) and value is not None:
        if isinstance(value, bool):
            raise ValueError("expected a number")
        value = float(value) if isinstance(value, str) else value
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("expected a finite number")
    return value


def _same(default: Any, value: Any) -> bool:
    if OmegaConf.is_config(default):
        default = OmegaConf.to_container(default, resolve=False)
    return type(default) is type(value) and default == value


def _settle(config: DictConfig, flat: Mapping[str, Any]) -> None:
    actor = config.actor_rollout_ref.actor
    if ACTOR + "grad_clip" in flat:
        if flat.get(ACTOR + "optim.clip_grad", actor.grad_clip) != actor.grad_clip:
            raise ConfigError("VERL config: actor.grad_clip and actor.optim.clip_grad differ")
        actor.optim.clip_grad = actor.grad_clip
    if ACTOR + "clip_ratio" in flat:
        for bound in ("clip_ratio_low", "clip_ratio_high"):
            if ACTOR + bound not in flat:
                actor[bound] = actor.clip_ratio
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        # VERL's default is the padded length, which here varies with the rows
        actor.loss_scale_factor = config.data.max_response_length
    rollout = config.actor_rollout_ref.rollout
    if rollout.log_prob_micro_batch_size_per_gpu is None:
        rollout.log_prob_micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu


def _check_values(config: DictConfig) -> None:
    problems = []
    for key, reason in keys.REQUIRED.items():
        value = OmegaConf.select(config, key)
        if value is None or keys.refusal(key, value) is not None:
            problems.append(f"{key} must be set: {reason}")
    for key in (*keys.POSITIVE_INTEGERS, *keys.OPTIONAL_POSITIVE_INTEGERS):
        value = OmegaConf.select(config, key)
        optional = key in keys.OPTIONAL_POSITIVE_INTEGERS or key in keys.REQUIRED
        if not ((value is None and optional) or (type(value) is int and value > 0)):
            problems.append(f"{key}={value!r}: expected a whole number above 0")
    if not config.actor_rollout_ref.rollout.temperature > 0:
        problems.append(f"{ROLLOUT}temperature must be above 0: training rollouts are sampled")
    if config.actor_rollout_ref.actor.ppo_mini_batch_size > config.data.train_batch_size:
        problems.append(
            f"{ACTOR}ppo_mini_batch_size={config.actor_rollout_ref.actor.ppo_mini_batch_size} "
            f"is above data.train_batch_size={config.data.train_batch_size}"
        )
    if problems:
        raise ConfigError("VERL config: " + "; ".join(problems))


def total_steps(config: DictConfig, train_size: int) -> int:
    """Return the number of iterations of a run.

    Args:
        config: Composed configuration.
        train_size: Rows of the train dataset.

    Returns:
        `trainer.total_training_steps`, or `trainer.total_epochs` times the full batches in one
        epoch, as VERL does.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return config.trainer.total_epochs * (train_size // config.data.train_batch_size)
