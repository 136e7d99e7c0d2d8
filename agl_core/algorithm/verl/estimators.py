"""Which of VERL's advantage estimators and policy losses work on batch rows, by name; no torch."""

OUTCOME: frozenset[str] = frozenset(
    {
        "grpo",  # Dr. GRPO is norm_adv_by_std_in_grpo=false with seq-mean-token-sum-norm
        "grpo_vectorized",
        "grpo_passk",
        "rloo",
        "rloo_vectorized",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
    }
)
"""Compare one value of each rollout within its group."""

TOKEN: frozenset[str] = frozenset({"gae", "reinforce_plus_plus"})
"""Take the rewards of a row's tokens; no group."""

NORMALISED: frozenset[str] = frozenset({"grpo", "grpo_vectorized", "grpo_passk"})
"""Read `algorithm.norm_adv_by_std_in_grpo`."""

REFUSED_ESTIMATORS: dict[str, str] = {
    "remax": "its baseline is the reward of a greedy rollout of each input, which is not sampled",
    "gdpo": "it normalises several rewards separately; rows carry one, weighted by "
    "agentlightning.credit.reward_weights",
    "optimal_token_baseline": "it compares rows token by token, and rollouts may have several",
    "tir_optimal_token_baseline": "it compares rows token by token, and rollouts may have several",
}

LOSSES: frozenset[str] = frozenset(
    {
        "vanilla",
        "dppo_tv",
        "dppo_kl",
        "gspo",
        "sapo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "geo_mean",
        "dro",
        "cispo",
    }
)
"""Values of `policy_loss.loss_mode`."""

SCALED: frozenset[str] = frozenset(
    {"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo"}
)
"""Losses that are proportional to a positive factor on a row's advantage."""

REFUSED_LOSSES: dict[str, str] = {
    "bypass_mode": "set algorithm.rollout_correction.bypass_mode=true instead",
}

KL_PENALTIES: frozenset[str] = frozenset(
    {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"}
)
"""Values of `kl_loss_type` and `kl_penalty`; `full` needs the logits of the whole vocabulary."""
