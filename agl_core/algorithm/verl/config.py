"""VERL's own `ppo_trainer` configuration with a user's overrides, checked key by key.

Composing reads the installed VERL's YAML files by Hydra and loads neither VERL nor torch.
"""

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agl_core.algorithm.verl import keys, limits, settings, values
from agl_core.algorithm.verl.keys import ACTOR, CRITIC, OURS
from agl_core.algorithm.verl.overrides import Overrides, normalise
from agl_core.errors import ConfigError

_ABSENT = object()
_OPEN = "override_optimizer_config"
"""A mapping that is null by default."""


def has_gpu() -> bool:
    """Say whether VERL would find a GPU here; loads no torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    built_for_cpu = version("torch").endswith("+cpu")
    return not hidden and not built_for_cpu and any(Path("/dev").glob("nvidia[0-9]*"))


def compose(overrides: Overrides, *, gpu: bool | None = None) -> DictConfig:
    """Return VERL's configuration with the overrides merged, after every check that needs no data.

    Where VERL reads one key and ignores its twin, the one that the user set decides:
    `actor.grad_clip` becomes `actor.optim.clip_grad`, and `actor.clip_ratio` becomes the low and
    high bound that are not set.

    Args:
        overrides: The user's settings; see `overrides`.
        gpu: Judge keys for a machine with, or without, a GPU; None looks for one.

    Raises:
        ConfigError: A key is unknown, or settings are refused; all refused ones are named.
    """
    flat = normalise(overrides)
    gpu = has_gpu() if gpu is None else gpu
    config = _defaults().copy()
    refused: defaultdict[str, list[str]] = defaultdict(list)
    for key, value in flat.items():
        default = _lookup(config, key)
        try:
            flat[key] = value = _coerce(key, default, value)
        except ValueError as error:
            refused[str(error)].append(f"{key}={value!r}")
            continue
        reason = keys.refusal(key, gpu=gpu)
        is_default = _same(default, value)
        if reason is not None and not keys.asks_for_nothing(
            key, value, is_default=is_default, gpu=gpu
        ):
            refused[reason].append(f"{key}={value!r}")
    _raise([f"{', '.join(set_to)}: {reason}" for reason, set_to in refused.items()])
    try:
        for key, value in flat.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        _raise(list(values.problems(config)))
        _settle(config, flat)
        _raise(list(limits.problems(config, flat)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"VERL config: {str(error).splitlines()[0]}") from error
    settings.batch_settings(config, min_group_size=1)
    return config


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("VERL config: " + "; ".join(problems))


@cache
def _defaults() -> DictConfig:
    spec = find_spec("verl")
    assert spec is not None, "hydra, which this module imports, came with VERL"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        config = hydra_compose("ppo_trainer")
    OmegaConf.update(config, OURS.removesuffix("."), settings.DEFAULTS, force_add=True)
    return config


def _lookup(config: DictConfig, key: str) -> Any:
    """Return the default value at a dotted key; `_ABSENT` below a mapping that VERL leaves open."""
    node: Any = config
    for name in key.split("."):
        if isinstance(node, DictConfig) and len(node) == 0:
            return _ABSENT
        if node is None and f".{_OPEN}." in key:
            return _ABSENT
        if not isinstance(node, DictConfig) or name not in list(node):  # `in` denies missing values
            raise ConfigError(f"VERL config: unknown key {key!r}{_suggestion(config, key)}")
        node = None if OmegaConf.is_missing(node, name) else node[name]
    if isinstance(node, DictConfig) and len(node) > 0:
        raise ConfigError(f"VERL config: {key!r} is a section, not a setting")
    return node


def _suggestion(config: DictConfig, key: str) -> str:
    leaves = list(default_leaves(config))
    near = get_close_matches(key, leaves, n=1, cutoff=0.8)
    if not near:  # the right name in the wrong section
        near = [leaf for leaf in leaves if leaf.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:1]
    return f"; did you mean {near[0]!r}?" if near else ""


def default_leaves(config: DictConfig | None = None) -> dict[str, Any]:
    """Return every key of VERL's configuration, and of ours, with its default as it is written."""
    plain: Any = OmegaConf.to_container(_defaults() if config is None else config, resolve=False)
    return normalise(plain)


def _coerce(key: str, default: Any, value: Any) -> Any:
    """Return the value in the default's type; YAML 1.1 reads `1e-6` as a string."""
    if value is None:
        if default is not None and default is not _ABSENT:
            raise ValueError("it is empty; give a value, or leave the key out for VERL's default")
        return None
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
    elif isinstance(default, int | float):
        return _number(value, takes_range=values.takes_range(key))
    elif isinstance(default, str) and not isinstance(value, str):
        raise ValueError("expected a text")
    return value


def _number(value: Any, *, takes_range: bool) -> Any:
    """Return a number, or the text of a range where that is one of the key's values."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise ValueError("expected a number")
    if isinstance(value, str) and takes_range and "_" in value:
        return value
    if isinstance(value, str):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def _same(default: Any, value: Any) -> bool:
    if OmegaConf.is_config(default):
        default = OmegaConf.to_container(default, resolve=False)
    of_one_type = isinstance(default, bool) is isinstance(value, bool)
    return of_one_type and default == value


def _settle(config: DictConfig, flat: Mapping[str, Any]) -> None:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    for section, settled in ((ACTOR, actor), (CRITIC, critic)):
        if section + "grad_clip" in flat:
            if flat.get(section + "optim.clip_grad", settled.grad_clip) != settled.grad_clip:
                raise ConfigError(
                    f"VERL config: {section}grad_clip and {section}optim.clip_grad differ"
                )
            settled.optim.clip_grad = settled.grad_clip
    if ACTOR + "clip_ratio" in flat:
        for bound in ("clip_ratio_low", "clip_ratio_high"):
            if ACTOR + bound not in flat:
                actor[bound] = actor.clip_ratio
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        # VERL's default is the padded length, which here varies with the rows
        actor.loss_scale_factor = settings.row_limits(config)[1]
    if CRITIC + "model.path" not in flat:
        critic.model.path = None  # the policy that training starts from
    _settle_truncation(config, flat)
    _settle_micro_batches(config)


def _settle_truncation(config: DictConfig, flat: Mapping[str, Any]) -> None:
    """Let VERL's key decide about prompts where the user wrote it."""
    if "data.truncation" not in flat:
        return
    key, value = OURS + "truncation.prompt", config.data.truncation
    if flat.get(key, value) != value:
        raise ConfigError(f"VERL config: data.truncation and {key} differ; set one of them")
    config.agentlightning.truncation.prompt = value


def _settle_micro_batches(config: DictConfig) -> None:
    """Take the rows of a forward pass from the actor where they are not set."""
    critic = config.critic
    micro_batch_size = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    rollout, reference = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    if rollout.log_prob_micro_batch_size_per_gpu is None:
        rollout.log_prob_micro_batch_size_per_gpu = micro_batch_size
    if reference.log_prob_micro_batch_size_per_gpu is None:
        size = rollout.log_prob_micro_batch_size_per_gpu
        reference.log_prob_micro_batch_size_per_gpu = size
    if critic.ppo_micro_batch_size_per_gpu is None:
        critic.ppo_micro_batch_size_per_gpu = micro_batch_size


def server_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a user's settings that are for the launch of vLLM and ask for something."""
    return {
        key: value
        for key, value in flat.items()
        if keys.verdict(key).fate is keys.Fate.SERVER
        and not keys.asks_for_nothing(key, value, is_default=False, gpu=True)
    }


def uses_critic(config: DictConfig) -> bool:
    """Say whether an update needs values of tokens."""
    return config.algorithm.adv_estimator == "gae"


def uses_reference(config: DictConfig) -> bool:
    """Say whether an update needs the log-probs of the policy that training starts from."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


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
