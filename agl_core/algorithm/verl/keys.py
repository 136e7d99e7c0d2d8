"""Which keys of VERL's configuration a user may set, and with which values.

Only keys that the user set to something else than VERL's default are judged. A key that is not in
the table is
refused: nothing that a user sets is ignored.
"""

from dataclasses import dataclass
from typing import Any

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."

HONOURED: frozenset[str] = frozenset(
    {
        "data.train_batch_size",  # inputs in one iteration
        "data.val_batch_size",  # validation rows, from the first; null is all of them
        "data.max_prompt_length",
        "data.max_response_length",  # `max_tokens` of each model request
        "data.seed",
        "data.shuffle",
        "actor_rollout_ref.model.path",
        ROLLOUT + "n",  # rollouts of one input
        ROLLOUT + "temperature",
        ROLLOUT + "log_prob_micro_batch_size_per_gpu",  # null is the actor's micro-batch size
        ROLLOUT + "val_kwargs.temperature",
        ROLLOUT + "val_kwargs.n",
        ROLLOUT + "val_kwargs.do_sample",  # false is temperature 0
        ACTOR + "ppo_mini_batch_size",  # in inputs, as in VERL; see `worker.mini_batches`
        ACTOR + "ppo_epochs",
        ACTOR + "ppo_micro_batch_size_per_gpu",  # rows in one forward pass
        ACTOR + "clip_ratio",
        ACTOR + "clip_ratio_low",
        ACTOR + "clip_ratio_high",
        ACTOR + "clip_ratio_c",
        ACTOR + "entropy_coeff",
        ACTOR + "calculate_entropy",
        ACTOR + "loss_agg_mode",
        ACTOR + "loss_scale_factor",
        ACTOR + "grad_clip",
        ACTOR + "shuffle",
        ACTOR + "data_loader_seed",
        ACTOR + "optim.lr",
        ACTOR + "optim.lr_warmup_steps",
        ACTOR + "optim.lr_warmup_steps_ratio",
        ACTOR + "optim.lr_scheduler_type",
        ACTOR + "optim.min_lr_ratio",
        ACTOR + "optim.num_cycles",
        ACTOR + "optim.zero_indexed_step",
        ACTOR + "optim.weight_decay",
        ACTOR + "optim.betas",
        ACTOR + "optim.clip_grad",
        "algorithm.norm_adv_by_std_in_grpo",
        "trainer.total_training_steps",  # iterations
        "trainer.total_epochs",  # used where total_training_steps is null
        "trainer.val_before_train",
        "trainer.test_freq",  # not set: every iteration is validated
    }
)


@dataclass(frozen=True, slots=True)
class Restriction:
    """The values of a key that are honoured so far."""

    allowed: tuple[Any, ...]
    reason: str


_RECORDED = "log-probs are recorded at the sampling temperature alone; only {} is supported"
_NO_KL = "a reference policy is not supported yet; only false is"
_DISCOUNT = "GRPO has one reward for each rollout and does not discount; only 1.0 is supported"

RESTRICTED: dict[str, Restriction] = {
    "algorithm.adv_estimator": Restriction(
        ("grpo",), "other estimators are not supported yet; set it to 'grpo'"
    ),
    "algorithm.gamma": Restriction((1,), _DISCOUNT),
    "algorithm.lam": Restriction((1,), _DISCOUNT),
    "algorithm.use_kl_in_reward": Restriction((False,), _NO_KL),
    ACTOR + "use_kl_loss": Restriction((False,), _NO_KL),
    ROLLOUT + "top_p": Restriction((1,), _RECORDED.format("1.0")),
    ROLLOUT + "top_k": Restriction((-1,), _RECORDED.format("-1")),
    ROLLOUT + "val_kwargs.top_p": Restriction((1,), "only 1.0 is supported yet"),
    ROLLOUT + "val_kwargs.top_k": Restriction((-1,), "only -1 is supported yet"),
}

REQUIRED: dict[str, str] = {
    "algorithm.adv_estimator": "VERL's default 'gae' needs a critic; set it to 'grpo'",
    ACTOR + "ppo_micro_batch_size_per_gpu": "VERL has no default for the rows of one forward pass",
}
"""Keys that have no usable default, with what to say about it."""

POSITIVE_INTEGERS: tuple[str, ...] = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    ROLLOUT + "n",
    ROLLOUT + "val_kwargs.n",
    ACTOR + "ppo_mini_batch_size",
    ACTOR + "ppo_epochs",
    ACTOR + "ppo_micro_batch_size_per_gpu",
    "trainer.total_epochs",
)
OPTIONAL_POSITIVE_INTEGERS: tuple[str, ...] = (
    "data.val_batch_size",
    "trainer.total_training_steps",
    ROLLOUT + "log_prob_micro_batch_size_per_gpu",
)


def refusal(key: str, value: Any) -> str | None:
    """Say why a key may not have a value that differs from VERL's default.

    Args:
        key: Dotted key of VERL's `ppo_trainer` configuration.
        value: What the user set.

    Returns:
        One sentence without the key, or None where the setting is honoured.
    """
    if key in HONOURED:
        return None
    restriction = RESTRICTED.get(key)
    if restriction is None:
        return "not supported yet"
    return None if value in restriction.allowed else restriction.reason
