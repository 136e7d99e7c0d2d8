"""Which keys need each other, or a value that others allow; reasons in one sentence."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agl_core.algorithm.verl.estimators import (
    LOSSES,
    NORMALISED,
    OUTCOME,
    REFUSED_ESTIMATORS,
    REFUSED_LOSSES,
    SCALED,
    TOKEN,
)
from agl_core.algorithm.verl.keys import ACTOR, CRITIC, OURS, ROLLOUT
from agl_core.algorithm.verl.values import CORRECTION
from agl_core.sampling import ENDINGS

PER_ROLLOUT_MODES: tuple[str, ...] = ("token-mean", "seq-mean-token-mean")
"""Values of `loss_agg_mode` that are averages."""


def problems(config: DictConfig, flat: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with values, each as `key=value: reason`.

    Args:
        config: Composed configuration.
        flat: The user's settings.
    """
    yield from _batch_sizes(config)
    yield from _sampling(config)
    if (num_gpus := flat.get("trainer.n_gpus_per_node", 1)) != 1:
        yield f"trainer.n_gpus_per_node={num_gpus!r}: expected 1, one rank learns"
    for section in (ACTOR, CRITIC):
        strategies = ("fsdp", "fsdp2")  # on CPUs VERL runs fsdp2 for both
        if flat.get(section + "strategy", "fsdp2") not in strategies:
            yield f"{section}strategy={flat[section + 'strategy']!r}: expected one of {strategies}"
    yield from _estimator(config, flat)
    yield from _critic(config, flat)
    yield from _loss(config)
    yield from _correction(config)


def _batch_sizes(config: DictConfig) -> Iterator[str]:
    if config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is None:
        yield (
            f"{ACTOR}ppo_micro_batch_size_per_gpu must be set: VERL has no default for the rows of "
            "one forward pass"
        )
    batch_size = config.data.train_batch_size
    for section in (ACTOR, CRITIC):
        mini_batch_size = OmegaConf.select(config, section + "ppo_mini_batch_size")
        if mini_batch_size > batch_size:
            yield (
                f"{section}ppo_mini_batch_size={mini_batch_size} is above "
                f"data.train_batch_size={batch_size}"
            )


def _sampling(config: DictConfig) -> Iterator[str]:
    if not config.actor_rollout_ref.rollout.temperature > 0:
        yield f"{ROLLOUT}temperature must be above 0: training rollouts are sampled"
    for section in (ROLLOUT, ROLLOUT + "val_kwargs."):
        top_p, top_k = (OmegaConf.select(config, section + name) for name in ("top_p", "top_k"))
        if not 0 < top_p <= 1:
            yield f"{section}top_p={top_p}: must be above 0 and at most 1"
        if type(top_k) is not int or not (top_k == -1 or top_k > 0):
            yield f"{section}top_k={top_k}: expected a whole number above 0, or -1 for all tokens"


def _estimator(config: DictConfig, flat: Mapping[str, Any]) -> Iterator[str]:
    settings = config.algorithm
    name = settings.adv_estimator
    if name not in OUTCOME | TOKEN:
        reason = REFUSED_ESTIMATORS.get(name, f"expected one of {sorted(OUTCOME | TOKEN)}")
        yield f"algorithm.adv_estimator={name!r}: {reason}"
        return
    ours = config.agentlightning
    if name in OUTCOME and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}n=1: {name} compares the rollouts of an input with each other; set it to 2 "
            f"or more, or algorithm.adv_estimator to one of {sorted(TOKEN)}"
        )
    if (
        name in OUTCOME
        and ours.trace_aggregator.level == "trajectory"
        and ours.credit.assignment in ("per_call", "discounted")
    ):
        yield (
            f"{OURS}credit.assignment={ours.credit.assignment!r}: {name} compares one value of a "
            f"row, and a whole trajectory is one; use {sorted(TOKEN)} or level 'transition'"
        )
    if settings.gamma != 1 and name not in TOKEN:
        yield f"algorithm.gamma={settings.gamma}: {name} does not discount"
    if settings.lam != 1 and name != "gae":
        yield f"algorithm.lam={settings.lam}: only gae reads it"
    if not settings.norm_adv_by_std_in_grpo and name not in NORMALISED:
        yield f"algorithm.norm_adv_by_std_in_grpo=False: only {sorted(NORMALISED)} read it"
    if not 0 <= settings.gamma <= 1 or not 0 <= settings.lam <= 1:
        yield "algorithm.gamma and algorithm.lam must be from 0 to 1"
    if settings.kl_ctrl.type == "adaptive" and not settings.kl_ctrl.horizon > 0:
        yield f"algorithm.kl_ctrl.horizon={settings.kl_ctrl.horizon}: must be above 0"


def _critic(config: DictConfig, flat: Mapping[str, Any]) -> Iterator[str]:
    name = config.algorithm.adv_estimator
    set_critic = [key for key in flat if key.startswith(CRITIC)]
    if name != "gae" and set_critic:
        yield f"{', '.join(set_critic)}: only gae has a critic"
    if config.critic.enable is not None and config.critic.enable != (name == "gae"):
        yield f"critic.enable={config.critic.enable}: gae has a critic, other estimators have none"
    if name != "gae" and config.trainer.critic_warmup:
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: only gae has a critic"


def _loss(config: DictConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    if mode not in LOSSES:
        reason = REFUSED_LOSSES.get(mode, f"expected one of {sorted(LOSSES)}")
        yield f"{ACTOR}policy_loss.loss_mode={mode!r}: {reason}"
    if mode == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        yield f"{ACTOR}policy_loss.dro_beta={actor.policy_loss.dro_beta}: dro needs one above 0"
    if not actor.clip_ratio_c > 1:
        yield f"{ACTOR}clip_ratio_c={actor.clip_ratio_c}: must be above 1"
    yield from _per_rollout(config)
    rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    micro = actor.ppo_micro_batch_size_per_gpu
    if mode == "geo_mean" and type(micro) is int and micro < rows:
        yield (
            f"{ACTOR}ppo_micro_batch_size_per_gpu={micro}: VERL takes geo_mean's mean over one "
            f"forward pass, so a mini-batch (about {rows} rows) must fit into one"
        )


def _per_rollout(config: DictConfig) -> Iterator[str]:
    key = OURS + "loss.per_rollout"
    if not config.agentlightning.loss.per_rollout:
        return
    actor = config.actor_rollout_ref.actor
    mode, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if aggregation not in PER_ROLLOUT_MODES:
        yield f"{key}: {ACTOR}loss_agg_mode={aggregation!r} is no mean; use {PER_ROLLOUT_MODES}"
    if mode not in SCALED:
        yield f"{key}: {mode} is not proportional to the advantage; use one of {sorted(SCALED)}"
    if mode == "sapo" and aggregation != "seq-mean-token-mean":
        yield f"{key}: sapo always takes {ACTOR}loss_agg_mode=seq-mean-token-mean; set it"
    if actor.use_kl_loss:
        yield f"{key}: {ACTOR}use_kl_loss has no advantage; use algorithm.use_kl_in_reward"
    if actor.entropy_coeff != 0:
        yield f"{key}: the bonus of {ACTOR}entropy_coeff={actor.entropy_coeff} has no advantage"


def _correction(config: DictConfig) -> Iterator[str]:
    section = CORRECTION
    settings = config.algorithm.rollout_correction
    if settings.rollout_rs is not None and settings.rollout_rs_threshold is None:
        yield f"{section}rollout_rs={settings.rollout_rs!r}: set rollout_rs_threshold as well"
    if settings.loss_type != "ppo_clip" and not settings.bypass_mode:
        yield f"{section}loss_type={settings.loss_type!r}: only bypass_mode=true reads it"
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if settings.bypass_mode and mode != "vanilla":
        yield f"{section}bypass_mode=True: it has a loss of its own, so not {mode!r}"
    rollout = config.actor_rollout_ref.rollout
    corrected = settings.rollout_is or settings.rollout_rs or settings.bypass_mode
    if corrected and (rollout.top_p != 1 or rollout.top_k != -1):
        yield (
            f"{section[:-1]} with {ROLLOUT}top_p={rollout.top_p}, top_k={rollout.top_k}: tokens "
            "would be sampled from another distribution than the one that log-probs are of"
        )
    allowed = set(config.agentlightning.sampling.allow or ()) - set(ENDINGS)
    if corrected and allowed:
        yield (
            f"{section[:-1]} with {OURS}sampling.allow={sorted(allowed)}: it compares log-probs of "
            "the policy's own distribution, and these fields change that of the rollouts"
        )
