"""Every key of VERL's configuration has a verdict, and every honoured one an effect."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import pytest
from omegaconf import OmegaConf

from agl_core.algorithm.verl.algorithm import VERL
from agl_core.algorithm.verl.config import compose, default_leaves
from agl_core.algorithm.verl.keys import Fate, refusal, verdict
from agl_core.algorithm.verl.overrides import normalise
from agl_core.errors import ConfigError
from agl_core.types.training import PolicyRef
from tests.agl_core.algorithm.verl.conftest import SETTINGS

GAE = normalise(SETTINGS) | {"algorithm.adv_estimator": "gae"}
BASE = PolicyRef(version="v000000", weights_digest="sha256:0", path="policy")

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
OURS = "agentlightning."

VALUES: dict[str, Any] = {
    "lr_scheduler_type": "cosine",
    "optimizer": "SGD",
    "optimizer_impl": "torch.optim.sgd",
    "betas": [0.8, 0.9],
    "override_optimizer_config": {"foreach": False},
    "strategy": "fsdp2",
    "loss_mode": "gspo",
    "loss_agg_mode": "seq-mean-token-mean",
    "kl_loss_type": "k1",
    "kl_penalty": "k2",
    "type": "adaptive",
    "rollout_is": "token",
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.5_2.0",
    "loss_type": "reinforce",
    "adv_estimator": "rloo",
    "path": "elsewhere",
    "enable": True,
    "ppo_mini_batch_size": 2,
    "clip_ratio_c": 5.0,
    "data_loader_seed": 3,
    "shuffle": True,
    "gamma": 0.9,
    "lam": 0.9,
}
"""A value other than the default, by the last name of a key."""


def other_value(key: str, default: Any) -> Any:
    name = key.rsplit(".", 1)[-1]
    if name in VALUES and not (name == "shuffle" and default is True):
        return VALUES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, str) and default.startswith("${"):
        return 1
    return (default or 0) + 1


LEAVES = default_leaves()
HONOURED = [key for key in LEAVES if verdict(key).fate is Fate.HONOURED]
DATACLASSES = (ACTOR, "critic.", "algorithm.")


def requests(config: dict[str, Any], mode: str = "train") -> Any:
    verl = VERL(config)
    state = verl.start(BASE.model_copy(update={"path": None}), range(20), range(8))
    return verl.propose(state) if mode == "train" else verl.validation(state)


def sampled_validation(name: str, value: float) -> dict[str, Any]:
    """Return the sampling parameters of a validation that is not greedy."""
    section = ROLLOUT + "val_kwargs."
    return requests(
        GAE | {section + "do_sample": True, section + name: value}, "val"
    ).sampling_parameters


def validated(config: dict[str, Any], step: int) -> bool:
    verl = VERL(config)
    state = verl.start(BASE.model_copy(update={"path": None}), range(20), range(8))
    return verl.validation(state.model_copy(update={"step": step})) is not None


def batch(config: dict[str, Any]) -> Any:
    return VERL(config).batch_settings


def differ(of: Any, **settings: Any) -> bool:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return of(GAE) != of(GAE | named)


def key(name: str, value: Any) -> dict[str, Any]:
    return {name.replace(".", "__"): value}


ALLOW = OURS + "sampling.allow"
TRAJECTORY = {OURS + "trace_aggregator.level": "trajectory"}
EFFECTS: dict[str, bool] = {
    "data.train_batch_size": differ(requests, **key("data.train_batch_size", 5)),
    "data.val_max_samples": differ(
        lambda config: requests(config, "val"), **key("data.val_max_samples", 3)
    ),
    "data.truncation": batch(GAE | {"data.truncation": "left"}).prompt_truncation == "left",
    "data.max_prompt_length": differ(batch, **key("data.max_prompt_length", 9)),
    "data.max_response_length": differ(batch, **key("data.max_response_length", 9)),
    "data.seed": differ(requests, **key("data.seed", 3)),
    "data.shuffle": differ(requests, **key("data.shuffle", False)),
    ALLOW: differ(batch, **key(ALLOW, ["stop"])),
    ROLLOUT + "n": differ(requests, **key(ROLLOUT + "n", 3)),
    ROLLOUT + "temperature": differ(requests, **key(ROLLOUT + "temperature", 0.5)),
    ROLLOUT + "top_p": differ(requests, **key(ROLLOUT + "top_p", 0.5)),
    ROLLOUT + "top_k": differ(requests, **key(ROLLOUT + "top_k", 5)),
    ROLLOUT + "val_kwargs.top_p": sampled_validation("top_p", 0.5)["top_p"] == 0.5,
    ROLLOUT + "val_kwargs.top_k": sampled_validation("top_k", 5)["extra_body"] == {"top_k": 5},
    ROLLOUT + "val_kwargs.n": differ(
        lambda config: requests(config, "val"), **key(ROLLOUT + "val_kwargs.n", 3)
    ),
    ROLLOUT + "val_kwargs.do_sample": sampled_validation("temperature", 0.5)["temperature"] == 0.5,
    ROLLOUT + "val_kwargs.temperature": sampled_validation("temperature", 0.7)["temperature"]
    == 0.7,
    "trainer.total_training_steps": differ(
        lambda config: VERL(config).num_iterations(
            VERL(config).start(BASE.model_copy(update={"path": None}), range(20), None)
        ),
        **key("trainer.total_training_steps", 9),
    ),
    "trainer.total_epochs": VERL(
        GAE | {"trainer.total_training_steps": None, "trainer.total_epochs": 2}
    ).num_iterations(VERL(GAE).start(BASE.model_copy(update={"path": None}), range(20), None))
    == 10,
    "trainer.val_before_train": not validated(GAE | {"trainer.val_before_train": False}, 0),
    "trainer.test_freq": not validated(GAE | {"trainer.test_freq": 2}, 1),
    "actor_rollout_ref.model.path": VERL(GAE | {"actor_rollout_ref.model.path": "x"}).model_path
    == "x",
    OURS + "trace_aggregator.level": batch(GAE | TRAJECTORY).level == "trajectory",
    OURS + "trace_aggregator.trajectory_max_prompt_length": batch(
        GAE | TRAJECTORY | {OURS + "trace_aggregator.trajectory_max_prompt_length": 7}
    ).max_prompt_length
    == 7,
    OURS + "trace_aggregator.trajectory_max_response_length": batch(
        GAE | TRAJECTORY | {OURS + "trace_aggregator.trajectory_max_response_length": 7}
    ).max_response_length
    == 7,
    OURS + "truncation.prompt": batch(GAE | {OURS + "truncation.prompt": "left"}).prompt_truncation
    == "left",
    OURS + "truncation.response": batch(
        GAE | {OURS + "truncation.response": "right"}
    ).response_truncation
    == "right",
    OURS + "truncation.unfinished": batch(GAE | {OURS + "truncation.unfinished": "mask"}).unfinished
    == "mask",
    OURS + "credit.assignment": batch(GAE | {OURS + "credit.assignment": "sum"}).credit == "sum",
    OURS + "credit.discount": batch(
        GAE | {OURS + "credit.assignment": "discounted", OURS + "credit.discount": 0.5}
    ).discount
    == 0.5,
    OURS + "credit.reward_weights": batch(
        GAE | {OURS + "credit.reward_weights.accuracy": 2.0}
    ).reward_weights
    == {"accuracy": 2.0},
    OURS + "filter.equal_rewards": batch(
        GAE | {OURS + "filter.equal_rewards": True}
    ).drop_equal_rewards,
    OURS + "filter.on_empty": batch(GAE | {OURS + "filter.on_empty": "skip"}).on_empty == "skip",
}
"""Keys whose effect is on proposals, states and batches, with whether it is there."""

ELSEWHERE = {
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": "test_worker",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "test_worker",
    "trainer.critic_warmup": "test_corrections",
    OURS + "loss.per_rollout": "test_update",
    "trainer.save_freq": "every iteration is kept, whatever it says",
    "data.val_batch_size": "test_algorithm: every validation row is scored, whatever it says",
    "trainer.n_gpus_per_node": "1 is all that may be set",
}
"""Keys whose effect another test shows, or that ask for what is so in any case."""


def test_every_key_has_a_verdict_and_a_reason_to_refuse_it():
    assert len(LEAVES) > 890
    for leaf in LEAVES:
        found = verdict(leaf)
        assert found.fate is Fate.HONOURED or found.reason, leaf


def test_every_honoured_key_is_shown_to_have_an_effect():
    ours = {*EFFECTS, *ELSEWHERE}
    rest = [leaf for leaf in HONOURED if leaf not in ours and not leaf.startswith(DATACLASSES)]
    assert rest == []
    assert {leaf for leaf in ours if leaf not in HONOURED} == set()


@pytest.mark.parametrize("leaf", sorted(EFFECTS))
def test_a_key_of_the_pipeline_has_its_effect(leaf: str):
    assert EFFECTS[leaf]


def honoured_below(section: str, *without: str) -> dict[str, Any]:
    """Every honoured key of a section, set away from its default."""
    return {
        leaf: other_value(leaf, LEAVES[leaf])
        for leaf in HONOURED
        if leaf.startswith(section) and not leaf.endswith(("path", *without))
    }


@pytest.mark.parametrize(
    ("section", "changed"),
    [
        (ACTOR, honoured_below(ACTOR)),
        ("critic.", honoured_below("critic.")),
        (
            "algorithm.",
            honoured_below("algorithm.", "adv_estimator", "norm_adv_by_std_in_grpo"),
        ),
        ("algorithm.", {"algorithm.adv_estimator": "rloo"}),
        (
            "algorithm.",
            {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
        ),
    ],
)
def test_keys_of_verls_reach_verls_own_configuration(section: str, changed: dict[str, Any]):
    from agl_core.algorithm.verl.build import _for_this_machine
    from agl_core.algorithm.verl.platform_cpu import quiet_imports

    with quiet_imports():
        from verl.utils.config import omega_conf_to_dataclass

    if section == "algorithm.":  # bypass_mode has a loss of its own
        base = GAE
    else:
        base = {key: value for key, value in GAE.items() if key not in changed}
    config = _for_this_machine(compose(normalise(base | changed), gpu=False), total_steps=4)
    part = OmegaConf.select(config, section.removesuffix("."))
    if section == "critic.":
        part = OmegaConf.masked_copy(part, [name for name in part if name != "model"])
    reached = omega_conf_to_dataclass(part)
    assert is_dataclass(reached)
    for leaf, value in changed.items():
        found: Any = reached
        for name in leaf.removeprefix(section).split("."):
            found = found[name] if isinstance(found, Mapping) else getattr(found, name)
        assert found == value != LEAVES[leaf], leaf


def test_all_keys_that_are_not_honoured_are_named_in_one_error():
    sections = {ROLLOUT + "mtp", ROLLOUT + "qat"}  # null means another section
    refused = {
        leaf: f"not {default}"
        for leaf, default in LEAVES.items()
        if verdict(leaf).fate is not Fate.HONOURED and leaf not in sections
    }
    with pytest.raises(ConfigError) as caught:
        compose(normalise(SETTINGS) | refused, gpu=False)
    message = str(caught.value)
    assert [leaf for leaf in refused if f"{leaf}=" not in message] == []
    for leaf in sections:
        with pytest.raises(ConfigError, match="is a section"):
            compose(normalise(SETTINGS) | {leaf: 1}, gpu=False)


def test_a_gpu_makes_more_keys_honoured():
    assert refusal(ACTOR + "fsdp_config.param_offload", gpu=True) is None
    assert refusal(ROLLOUT + "gpu_memory_utilization", gpu=True) is None
    assert refusal("actor_rollout_ref.model.lora_rank", gpu=True) == "LoRA is not supported yet"
