"""Which values an honoured key takes by itself, where the type of VERL's default does not say it.

A value that VERL would refuse, or misread, when the first update is made is found before anything
starts.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agl_core.algorithm.verl.estimators import KL_PENALTIES
from agl_core.algorithm.verl.keys import ACTOR, CRITIC, OURS, REFERENCE, ROLLOUT

CORRECTION = "algorithm.rollout_correction."
_REJECTIONS = frozenset(
    {
        *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
        *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
    }
)
"""Parts of `rollout_rs`, separated by commas."""
_OPTIMIZERS = frozenset(
    {
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("RMSprop", "SGD"),
    }
)
"""Of `torch.optim`; those that take VERL's arguments."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a value may be."""

    expected: str
    fits: Callable[[Any], bool]


def _whole(low: int) -> _Kind:
    expected = "above 0" if low == 1 else f"of {low} or more"
    return _Kind(f"a whole number {expected}", lambda value: type(value) is int and value >= low)


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(kind.expected, lambda value: value is None or kind.fits(value))


def _one_of(choices: Iterable[Any]) -> _Kind:
    allowed = list(choices)
    return _Kind(f"one of {allowed}", lambda value: value in allowed)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_threshold(value: Any) -> bool:
    """Say whether a value is an upper bound, or `lower_upper`."""
    if _is_number(value):
        return value > 0
    try:
        bounds = [float(part) for part in value.split("_")]
    except (AttributeError, ValueError):
        return False
    return len(bounds) <= 2 and 0 < bounds[0] <= bounds[-1] < float("inf")


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_BETA.fits, value))


_POSITIVE = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_NOT_NEGATIVE = _Kind("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
_FRACTION = _Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_BETA = _Kind("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1)
_COUNT = _whole(1)
_LOSS_MEANS = _one_of(
    (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    )
)
_KL = _one_of(sorted(KL_PENALTIES))


def _optimizer(section: str) -> dict[str, _Kind]:
    return {
        section + "betas": _Kind("two numbers from 0 to below 1", _are_betas),
        section + "clip_grad": _POSITIVE,
        section + "lr": _NOT_NEGATIVE,
        section + "lr_scheduler_type": _one_of(("constant", "cosine")),
        section + "lr_warmup_steps": _whole(-1),
        section + "lr_warmup_steps_ratio": _FRACTION,
        section + "min_lr_ratio": _FRACTION,
        section + "override_optimizer_config": _Kind(
            "a mapping of arguments", lambda value: value is None or isinstance(value, dict)
        ),
        section + "weight_decay": _NOT_NEGATIVE,
    }


_KINDS: dict[str, _Kind] = {
    "data.train_batch_size": _COUNT,
    "data.max_prompt_length": _COUNT,
    "data.max_response_length": _COUNT,
    "data.val_batch_size": _or_null(_COUNT),
    "data.val_max_samples": _whole(-1),
    "data.seed": _or_null(_whole(0)),
    "data.truncation": _one_of(("error", "left", "right")),
    "trainer.total_epochs": _COUNT,
    "trainer.total_training_steps": _or_null(_COUNT),
    "trainer.test_freq": _whole(-1),
    "trainer.save_freq": _whole(-1),
    "trainer.critic_warmup": _whole(0),
    ROLLOUT + "n": _COUNT,
    ROLLOUT + "val_kwargs.n": _COUNT,
    ROLLOUT + "val_kwargs.temperature": _NOT_NEGATIVE,
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": _or_null(_COUNT),
    REFERENCE + "log_prob_micro_batch_size_per_gpu": _or_null(_COUNT),
    ACTOR + "clip_ratio": _NOT_NEGATIVE,
    ACTOR + "clip_ratio_low": _NOT_NEGATIVE,
    ACTOR + "clip_ratio_high": _NOT_NEGATIVE,
    ACTOR + "data_loader_seed": _whole(0),
    ACTOR + "entropy_from_logits_chunk_size": _COUNT,
    ACTOR + "grad_clip": _POSITIVE,
    ACTOR + "kl_loss_type": _KL,
    ACTOR + "loss_agg_mode": _LOSS_MEANS,
    ACTOR + "loss_scale_factor": _or_null(_POSITIVE),
    ACTOR + "policy_loss.clip_cov_ratio": _NOT_NEGATIVE,
    ACTOR + "policy_loss.dro_beta": _or_null(_POSITIVE),
    ACTOR + "policy_loss.kl_cov_ratio": _NOT_NEGATIVE,
    ACTOR + "ppo_epochs": _COUNT,
    ACTOR + "ppo_micro_batch_size_per_gpu": _or_null(_COUNT),
    ACTOR + "ppo_mini_batch_size": _COUNT,
    ACTOR + "tau_neg": _POSITIVE,
    ACTOR + "tau_pos": _POSITIVE,
    CRITIC + "cliprange_value": _POSITIVE,
    CRITIC + "data_loader_seed": _whole(0),
    CRITIC + "enable": _one_of((None, True, False)),
    CRITIC + "forward_micro_batch_size_per_gpu": _or_null(_COUNT),
    CRITIC + "grad_clip": _POSITIVE,
    CRITIC + "loss_agg_mode": _LOSS_MEANS,
    CRITIC + "loss_scale_factor": _or_null(_POSITIVE),
    CRITIC + "ppo_epochs": _COUNT,
    CRITIC + "ppo_micro_batch_size_per_gpu": _or_null(_COUNT),
    CRITIC + "ppo_mini_batch_size": _COUNT,
    **_optimizer(ACTOR + "optim."),
    **_optimizer(CRITIC + "optim."),
    "algorithm.kl_ctrl.target_kl": _POSITIVE,
    "algorithm.kl_ctrl.type": _one_of(("fixed", "adaptive")),
    "algorithm.kl_penalty": _KL,
    CORRECTION + "loss_type": _one_of(("ppo_clip", "reinforce")),
    CORRECTION + "rollout_is": _one_of((None, "token", "sequence")),
    CORRECTION + "rollout_is_threshold": _Kind(
        "a number above 0, or two as lower_upper", _is_threshold
    ),
    CORRECTION + "rollout_rs": _Kind(
        f"some of {sorted(_REJECTIONS)}, separated by commas",
        lambda value: value is None or _are_rejections(value),
    ),
    OURS + "credit.reward_weights": _Kind(
        "a mapping of names to numbers",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
    OURS + "loss.per_rollout": _Kind("true or false", lambda value: isinstance(value, bool)),
    OURS + "sampling.allow": _Kind(
        "a list of fields",
        lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    ),
    OURS + "trace_aggregator.trajectory_max_prompt_length": _COUNT,
    OURS + "trace_aggregator.trajectory_max_response_length": _COUNT,
}


def problems(config: DictConfig) -> Iterator[str]:
    """Yield what is wrong with single values, each as `key=value: expected ...`.

    Args:
        config: Composed configuration.
    """
    for key, kind in _KINDS.items():
        value = OmegaConf.select(config, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value)
        if not kind.fits(value):
            yield f"{key}={value!r}: expected {kind.expected}"
    yield from _rejection_thresholds(config)
    for section in (ACTOR, CRITIC):
        yield from _optimizer_class(config, section + "optim.")


def takes_range(key: str) -> bool:
    """Say whether the value of a key may be a lower and an upper bound, `0.5_2.0`."""
    return key == CORRECTION + "rollout_is_threshold"


def _are_rejections(value: Any) -> bool:
    return isinstance(value, str) and bool(parts := _parts(value)) and set(parts) <= _REJECTIONS


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _rejection_thresholds(config: DictConfig) -> Iterator[str]:
    """Compare thresholds with what they are of: one for all, or one each; only a ratio, `k1`, has a
    lower bound.
    """
    settings = config.algorithm.rollout_correction
    found = settings.rollout_rs_threshold
    if found is None:
        return
    names = _parts(settings.rollout_rs) if isinstance(settings.rollout_rs, str) else ["token_k1"]
    bounds = _parts(found) if isinstance(found, str) else [found]
    if len(bounds) == 1:
        bounds = bounds * len(names)
    if len(bounds) != len(names) or not all(
        _is_threshold(bound) and (name.endswith("k1") or "_" not in str(bound))
        for name, bound in zip(names, bounds, strict=True)
    ):
        yield (
            f"{CORRECTION}rollout_rs_threshold={found!r}: expected a number above 0, for each part "
            "of rollout_rs or one for all, separated by commas; for those that end in k1 also two "
            "numbers as lower_upper"
        )


def _optimizer_class(config: DictConfig, section: str) -> Iterator[str]:
    """Look for the optimizer, without loading it."""
    module, name = (
        OmegaConf.select(config, section + key) for key in ("optimizer_impl", "optimizer")
    )
    if module == "torch.optim":
        if name not in _OPTIMIZERS:
            yield f"{section}optimizer={name!r}: expected one of {sorted(_OPTIMIZERS)}"
    elif find_spec(module.partition(".")[0] or "_") is None:
        yield f"{section}optimizer_impl={module!r}: there is no such module here"
