"""Composing VERL's configuration: what is merged, what is refused, what is said about it."""

import subprocess
import sys
from contextlib import nullcontext

import pytest

from agl_core.algorithm.verl.config import compose, server_settings, total_steps
from agl_core.algorithm.verl.overrides import normalise, parse_overrides
from agl_core.errors import ConfigError
from tests.agl_core.algorithm.verl.conftest import SETTINGS

ACTOR = "actor_rollout_ref.actor."


def test_nested_and_dotted_overrides_are_one_flat_dict():
    overrides = {"a": {"b.c": 1, "d": {"e": [1, 2]}}, "f.g": {"h": None}, "i": {}}
    assert normalise(overrides) == {"a.b.c": 1, "a.d.e": [1, 2], "f.g.h": None, "i": {}}


def test_a_key_in_two_spellings_is_refused():
    with pytest.raises(ConfigError, match=r"a\.b is set twice"):
        normalise({"a": {"b": 1}, "a.b": 2})


def test_a_key_that_is_no_name_is_refused():
    with pytest.raises(ConfigError, match="not a name"):
        normalise({"a": {1: 2}})


def test_overrides_are_merged_into_verls_defaults():
    config = compose(SETTINGS)
    assert config.data.train_batch_size == 4
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3
    assert config.actor_rollout_ref.actor.clip_ratio_c == 3.0
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0
    assert config.actor_rollout_ref.rollout.val_kwargs.do_sample is False


def test_composing_twice_does_not_share_settings():
    compose(SETTINGS | {"trainer.test_freq": 3})
    assert compose(SETTINGS).trainer.test_freq == -1


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
    ],
)
def test_an_unknown_key_is_named_with_a_near_match(key: str, suggestion: str):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{suggestion}'"):
        compose(SETTINGS | {key: 1})


def test_a_section_cannot_be_set_as_a_whole():
    with pytest.raises(ConfigError, match="'data' is a section"):
        compose(SETTINGS | {"data": 3})


def test_every_unsupported_key_is_listed_with_its_reason():
    refused = {
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.override_config.attn_implementation": "eager",
        ACTOR + "checkpoint.async_save": True,
        "data.gen_batch_size": 4,
        "actor_rollout_ref.rollout.dtype": "float32",
    }
    with pytest.raises(ConfigError) as caught:
        compose(SETTINGS | refused, gpu=False)
    message = str(caught.value)
    assert all(key in message for key in refused)
    assert "lora_rank=8: LoRA is not supported yet" in message


def test_an_unsupported_key_at_verls_default_is_accepted():
    same = {ACTOR + "use_kl_loss": False, "actor_rollout_ref.model.lora_rank": 0}
    same |= {"algorithm.gamma": 1.0, "trainer.nnodes": 1, "trainer.resume_mode": "auto"}
    compose(SETTINGS | same)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.logger", ["console", "wandb"]),
        ("trainer.n_gpus_per_node", 8),
        ("trainer.project_name", "verl_examples"),
        ("trainer.default_local_dir", "checkpoints/${trainer.project_name}"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.5),
        ("actor_rollout_ref.rollout.dtype", "bfloat16"),
        ("actor_rollout_ref.rollout.seed", 42),
        ("data.train_files", "~/data/rlhf/gsm8k/train.parquet"),
        ("agentlightning.port", 9999),
        (ACTOR + "fsdp_config.dtype", "bfloat16"),
    ],
)
def test_verls_default_is_refused_where_something_else_is_done(key: str, value: object):
    with pytest.raises(ConfigError, match=key):
        compose(normalise(SETTINGS) | {key: value}, gpu=False)


def test_the_truncation_that_a_user_writes_counts_also_as_verls_default():
    assert compose(SETTINGS).agentlightning.truncation.prompt == "drop"
    written = compose(normalise(SETTINGS) | {"data.truncation": "error"})
    assert written.agentlightning.truncation.prompt == "error"
    both = {"data.truncation": "error", "agentlightning.truncation.prompt": "left"}
    with pytest.raises(ConfigError, match="differ"):
        compose(normalise(SETTINGS) | both)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (ACTOR + "strategy", "fsdp"),
        (ACTOR + "use_torch_compile", False),
        (ACTOR + "fsdp_config.param_offload", True),
        (ACTOR + "fsdp_config.forward_prefetch", True),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", False),
        ("actor_rollout_ref.model.use_remove_padding", False),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 1),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", 4096),
        ("actor_rollout_ref.ref.strategy", "fsdp2"),
        ("actor_rollout_ref.ref.entropy_checkpointing", True),
        ("actor_rollout_ref.nccl_timeout", 14400),
        (ACTOR + "ppo_max_token_len_per_gpu", 3000),
        (ACTOR + "fsdp_config.fsdp_size", 1),
        ("trainer.balance_batch", False),
        ("trainer.device", "cpu"),
        ("trainer.logger", ["console"]),
        ("trainer.n_gpus_per_node", 1),
    ],
)
def test_a_setting_that_changes_nothing_on_a_cpu_is_accepted(key: str, value: object):
    compose(normalise(SETTINGS) | {key: value}, gpu=False)


@pytest.mark.parametrize(
    "key",
    [
        "data.train_batch_size",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.rollout.top_p",
        "actor_rollout_ref.rollout.val_kwargs.temperature",
        ACTOR + "ppo_mini_batch_size",
        ACTOR + "clip_ratio_c",
        ACTOR + "entropy_coeff",
        ACTOR + "optim.lr",
        "algorithm.gamma",
        "algorithm.lam",
        "trainer.test_freq",
    ],
)
def test_an_empty_key_is_refused_at_once_where_verl_needs_a_value(key: str):
    with pytest.raises(ConfigError, match=f"{key}=None: it is empty"):
        compose(normalise(SETTINGS) | {key: None})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algorithm.adv_estimator", "remax", "greedy rollout of each input"),
        ("algorithm.adv_estimator", "ppo", "expected one of"),
        ("algorithm.gamma", 0.9, "grpo does not discount"),
        ("algorithm.lam", 0.9, "only gae reads it"),
        ("critic.optim.lr", 1e-4, "only gae has a critic"),
        ("critic.enable", True, "gae has a critic"),
        ("trainer.critic_warmup", 3, "only gae has a critic"),
        ("trainer.n_gpus_per_node", 2, "expected 1"),
        ("actor_rollout_ref.rollout.n", 1, "compares the rollouts of an input"),
        ("trainer.test_freq", 1.5, "whole number"),
        ("data.seed", "one", "whole number"),
        (ACTOR + "optim.lr_scheduler_type", "linear", "expected one of"),
        (ACTOR + "optim.lr", [1e-6], "expected a number"),
        ("algorithm.adv_estimator", ["grpo"], "expected a text"),
        (ACTOR + "policy_loss.loss_mode", "bypass_mode", "rollout_correction.bypass_mode=true"),
        (ACTOR + "policy_loss.loss_mode", "dro", "dro needs one above 0"),
        (ACTOR + "policy_loss.loss_mode", "geo_mean", "must fit into one"),
        (ACTOR + "kl_loss_type", "full", "expected one of"),
        (ACTOR + "loss_agg_mode", "mean", "expected one of"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1", "set rollout_rs_threshold"),
        ("algorithm.rollout_correction.loss_type", "reinforce", "only bypass_mode=true reads it"),
        ("agentlightning.port", 1234, "every process finds its own port"),
        ("agentlightning.trace_aggregator.debug", True, "counted in any case"),
        ("agentlightning.trace_aggregator.level", "token", "agentlightning.trace_aggregator.level"),
        ("agentlightning.truncation.prompt", "middle", "agentlightning.truncation.prompt"),
        ("agentlightning.credit.discount", 0.5, "needs credit 'discounted'"),
        (ACTOR + "ppo_micro_batch_size_per_gpu", None, "must be set"),
        ("data.train_batch_size", 0, "above 0"),
        (ACTOR + "ppo_epochs", 1.5, "whole number"),
        (ACTOR + "optim.lr", "fast", "could not convert"),
        (ACTOR + "entropy_coeff", "0.5_2.0", "could not convert"),
        (ACTOR + "clip_ratio_low", -0.1, "a number of 0 or more"),
        (ACTOR + "loss_scale_factor", "long", "a number above 0"),
        (ACTOR + "optim.betas", [0.9, 1.0], "two numbers from 0 to below 1"),
        (ACTOR + "optim.clip_grad", -1, "a number above 0"),
        (ACTOR + "optim.lr_warmup_steps_ratio", 1.5, "a number from 0 to 1"),
        (ACTOR + "optim.optimizer", "AdamV", "expected one of .*AdamW"),
        (ACTOR + "optim.optimizer_impl", "no_such_package.optim", "no such module"),
        (ACTOR + "optim.override_optimizer_config", [1], "a mapping"),
        (ACTOR + "policy_loss.dro_beta", "much", "a number above 0"),
        ("agentlightning.credit.reward_weights", "quality", "a mapping of names to numbers"),
        ("agentlightning.sampling.allow", "stop", "a list of fields"),
        ("algorithm.rollout_correction.rollout_is_threshold", -2, "a number above 0, or two"),
        ("algorithm.rollout_correction.rollout_is_threshold", "3_2", "a number above 0, or two"),
        ("algorithm.rollout_correction.rollout_rs", "token_k9", "some of .*token_k1"),
        ("algorithm.rollout_correction.rollout_rs_threshold", "1,2", "for each part"),
        (ACTOR + "shuffle", 1, "true or false"),
        ("actor_rollout_ref.rollout.temperature", 0, "temperature must be above 0"),
        (ACTOR + "ppo_mini_batch_size", 5, "above data.train_batch_size"),
    ],
)
def test_a_bad_value_is_refused(key: str, value: object, message: str):
    with pytest.raises(ConfigError, match=message):
        compose(normalise(SETTINGS) | {key: value})


def test_a_number_that_yaml_reads_as_text_is_a_number():
    config = compose(normalise(SETTINGS) | {ACTOR + "optim.lr": "1e-6"})
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


@pytest.mark.parametrize(
    ("names", "bounds", "is_right"),
    [
        ("token_k1,seq_mean_k3", "0.5_2.0,1", True),
        ("token_k1, seq_mean_k3", 2.0, True),
        ("token_k1,seq_mean_k3", "0.5_2.0", False),  # only a ratio has a lower bound
        ("token_k1", [0.5, 2.0], False),
    ],
)
def test_thresholds_of_rejection_belong_to_its_parts(names: str, bounds: object, is_right: bool):
    section = "algorithm.rollout_correction.rollout_rs"
    settings = normalise(SETTINGS) | {section: names, section + "_threshold": bounds}
    refused = pytest.raises(ConfigError, match=r"rs_threshold=.*lower_upper")
    with nullcontext() if is_right else refused:
        compose(settings)


def test_a_twin_key_that_verl_ignores_decides():
    actor = compose(
        SETTINGS
        | {ACTOR + "grad_clip": 0.5, ACTOR + "clip_ratio": 0.1, ACTOR + "clip_ratio_low": 0.3}
    ).actor_rollout_ref.actor
    assert actor.optim.clip_grad == 0.5
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.1)


def test_twin_keys_that_differ_are_refused():
    with pytest.raises(ConfigError, match="differ"):
        compose(SETTINGS | {ACTOR + "grad_clip": 0.5, ACTOR + "optim.clip_grad": 2.0})


def test_steps_follow_from_epochs_where_they_are_not_set():
    config = compose(SETTINGS | {"trainer.total_training_steps": None, "trainer.total_epochs": 3})
    assert total_steps(config, train_size=10) == 6
    assert total_steps(compose(SETTINGS), train_size=10) == 4


def test_the_algorithm_is_built_without_torch():
    code = (
        "import sys; from agl_core.algorithm.verl.algorithm import VERL;"
        "from tests.agl_core.algorithm.verl.conftest import SETTINGS; VERL(SETTINGS);"
        "print([m for m in ('torch', 'verl', 'ray', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan"])
def test_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(ConfigError, match=r"clip_ratio=.*: expected a finite number"):
        compose({**SETTINGS, ACTOR + "clip_ratio": value})


def test_an_outcome_estimator_needs_one_value_of_a_row():
    per_call = {
        "agentlightning.trace_aggregator.level": "trajectory",
        "agentlightning.credit.assignment": "per_call",
    }
    with pytest.raises(ConfigError, match="grpo compares one value of a row"):
        compose(normalise(SETTINGS) | per_call)
    compose(normalise(SETTINGS) | per_call | {"algorithm.adv_estimator": "gae"})


def test_correction_of_truncated_sampling_is_refused():
    truncated = {
        "algorithm.rollout_correction.rollout_is": "token",
        "actor_rollout_ref.rollout.top_p": 0.9,
    }
    with pytest.raises(ConfigError, match="another distribution"):
        compose(normalise(SETTINGS) | truncated)


def test_correction_beside_other_distributions_of_agents_is_refused_but_not_beside_stop_texts():
    corrected = {"algorithm.rollout_correction.rollout_is": "token"}
    allow = "agentlightning.sampling.allow"
    with pytest.raises(ConfigError, match=r"sampling.allow=\['min_p'\]: it compares log-probs"):
        compose(normalise(SETTINGS) | corrected | {allow: ["min_p", "stop"]})
    compose(normalise(SETTINGS) | corrected | {allow: ["stop", "ignore_eos"]})
    compose(normalise(SETTINGS) | {allow: ["min_p"]})


def test_a_field_that_changes_no_distribution_cannot_be_allowed():
    with pytest.raises(
        ConfigError, match=r"sampling.allow: .*max_tokens is not a field that chang"
    ):
        compose(normalise(SETTINGS) | {"agentlightning.sampling.allow": ["max_tokens", "top_p"]})


def test_validation_may_be_truncated_whatever_training_corrects():
    key = "actor_rollout_ref.rollout.val_kwargs."
    corrected = {"algorithm.rollout_correction.rollout_is": "token"}
    compose(normalise(SETTINGS) | corrected | {key + "top_p": 0.9, key + "top_k": 20})


@pytest.mark.parametrize("section", ["rollout.", "rollout.val_kwargs."])
@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0), ("top_p", 1.1), ("top_k", 0), ("top_k", -2)]
)
def test_truncation_that_leaves_nothing_to_sample_is_refused(section, name, value):
    key = f"actor_rollout_ref.{section}{name}"
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        compose(normalise(SETTINGS) | {key: value})


CALC_X = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.6,
            "engine_kwargs": {
                "vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
            },
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {
            "log_prob_micro_batch_size_per_gpu": 8,
            "fsdp_config": {"param_offload": True},
        },
        "model": {
            "path": "Qwen/Qwen2.5-1.5B-Instruct",
            "use_remove_padding": True,
            "enable_gradient_checkpointing": True,
        },
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "nnodes": 1,
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
    "agentlightning": {
        "trace_aggregator": {
            "level": "trajectory",
            "trajectory_max_prompt_length": 2048,
            "trajectory_max_response_length": 8192,
        }
    },
}
"""The configuration of Agent Lightning's calculator example."""


def test_the_calculator_of_agent_lightning_is_accepted_on_a_gpu():
    config = compose(CALC_X, gpu=True)
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser == "hermes"
    assert config.actor_rollout_ref.actor.fsdp_config.param_offload is True


def test_settings_for_vllm_are_known_where_it_would_be_launched():
    found = server_settings(normalise(CALC_X))
    rollout = "actor_rollout_ref.rollout."
    assert found == {
        rollout + "name": "vllm",
        rollout + "gpu_memory_utilization": 0.6,
        rollout + "engine_kwargs.vllm.enable_auto_tool_choice": True,
        rollout + "engine_kwargs.vllm.tool_call_parser": "hermes",
    }


def test_without_a_gpu_one_message_lists_all_that_must_change():
    with pytest.raises(ConfigError) as caught:
        compose(CALC_X, gpu=False)
    named = {part.split("=")[0] for part in str(caught.value).removeprefix("VERL config: ").split()}
    rollout = "actor_rollout_ref.rollout."
    assert {name for name in named if "." in name} == {
        rollout + "name",
        rollout + "gpu_memory_utilization",
        rollout + "engine_kwargs.vllm.enable_auto_tool_choice",
        rollout + "engine_kwargs.vllm.tool_call_parser",
    }


def test_command_line_overrides_are_in_hydras_grammar():
    texts = [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.optim.betas=[0.8,0.9]",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser=hermes",
        "data.val_batch_size=null",
        "agentlightning.credit.reward_weights={accuracy: 1.0, format: 0.1}",
        "data.train_batch_size=8",
    ]
    assert parse_overrides(texts) == {
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.betas": [0.8, 0.9],
        "actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser": "hermes",
        "data.val_batch_size": None,
        "agentlightning.credit.reward_weights.accuracy": 1.0,
        "agentlightning.credit.reward_weights.format": 0.1,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data.train_batch_size 4", "of the form key=value"),
        ("~data.train_batch_size", "cannot be deleted"),
        ("data.train_batch_size=4,8", "write a list"),
    ],
)
def test_an_override_that_means_nothing_here_is_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_overrides([text])


def test_a_yaml_file_and_texts_say_the_same_as_a_dict(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("data: {train_batch_size: 4}\nactor_rollout_ref.actor.optim.lr: 1.0e-6\n")
    same = {"data.train_batch_size": 4, "actor_rollout_ref.actor.optim.lr": 1e-6}
    assert normalise(path) == normalise(str(path)) == same
    assert normalise([f"{key}={value}" for key, value in same.items()]) == same
    with pytest.raises(ConfigError, match="cannot be read"):
        normalise(tmp_path / "none.yaml")
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds no mapping"):
        normalise(path)
