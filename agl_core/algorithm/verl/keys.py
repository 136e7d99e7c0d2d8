"""What becomes of each key of VERL's configuration that a user writes, also at VERL's default.

Every key has one verdict, found by the longest matching prefix in `RULES`: it is honoured, honoured
on a GPU only, forwarded to the launch of vLLM, or refused with the reason. Nothing that a user sets
is ignored. Keys under a switch that is off (`kl_loss_coef` without `use_kl_loss`) are accepted, as
VERL does. `refusal` judges a key, and `asks_for_nothing` the values that a refused one may still
have, since they say what is so in any case. `limits` says which values of an honoured key work, and
which keys need each other.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

ACTOR = "actor_rollout_ref.actor."
MODEL = "actor_rollout_ref.model."
REFERENCE = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."
CRITIC = "critic."
OURS = "agentlightning."


class Fate(StrEnum):
    """What becomes of a key."""

    HONOURED = "honoured"
    SPEED = "speed"
    """Changes nothing that is learned: speed and memory on a GPU, or nothing at all here."""
    GPU = "gpu"
    """Honoured where there is a GPU; refused elsewhere."""
    SERVER = "server"
    """An argument of vLLM's launch; refused where the embedded engine serves."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A key's fate, with the reason where it is, or may be, refused."""

    fate: Fate
    reason: str = ""


_HONOURED = Verdict(Fate.HONOURED)
_SERVER = Verdict(Fate.SERVER, "a setting of vLLM, and here the embedded engine serves the policy")
_SPEED = Verdict(Fate.SPEED, "changes how a GPU works, not what is learned")
_GPU = Verdict(Fate.GPU, "only a GPU makes use of it, and there is none here; leave it out")


def _refused(reason: str) -> Verdict:
    return Verdict(Fate.REFUSED, reason)


_ONE_RANK = _refused("one rank learns; nothing is split over several")
_TEXT = _refused("policies are language models over text")
_PROFILER = _refused("VERL's profiler is not run")
_BATCH_SIZE = _refused("use the key of the same name that ends in _per_gpu")
_INERT = Verdict(Fate.SPEED, "read by what is off or refused here, so without effect")
_DYNAMIC = _refused("a forward pass has a fixed number of rows; set the micro-batch size")
_PADDING = _refused("rows are padded to the longest of their forward pass, as they come")
_CHECKPOINT = _refused("the ledger keeps model, optimizer and RNG after every update")
_FOLDER = _refused("configuration, tokenizer and chat template are those of the policy's folder")
_REWARD = _refused("rewards come from the agent")
_DATA = _refused("datasets are the run's train_data and val_data; the agent makes the prompts")
_NAME = _refused("runs are named by run_id")
_LORA = _refused("LoRA is not supported yet")
_CODE = _refused("code beside the policy is not loaded")


def _optimizer(section: str) -> dict[str, Verdict]:
    return {
        section + "optim.": _HONOURED,
        section + "optim._target_": _refused("VERL's own class is used"),
        section + "optim.warmup_style": _refused("its name is lr_scheduler_type now"),
        section + "optim.total_training_steps": _refused("set trainer.total_training_steps"),
    }


def _engine(section: str) -> dict[str, Verdict]:
    """Keys of an FSDP engine."""
    return {
        section: _GPU,
        section + "_target_": _refused("VERL's own class is used"),
        **{
            section + name: _SPEED
            for name in (
                "wrap_policy.",
                "param_offload",
                "optimizer_offload",
                "offload_policy",
                "reshard_after_forward",
                "forward_prefetch",
                "use_orig_params",
                "use_torch_compile",
            )
        },
        section + "fsdp_size": _ONE_RANK,
        section + "ulysses_sequence_parallel_size": _ONE_RANK,
        section + "use_no_sync_for_gradient_accumulation": _ONE_RANK,
        section + "forward_only": _refused("follows from what the model is for"),
        section + "strategy": _refused("set the section's own strategy"),
        section + "entropy_": _refused("set the key of the same name of actor_rollout_ref.actor"),
        section + "pad_to_length": _PADDING,
        section + "pad_to_length_bucket": _PADDING,
        section + "qat.": _refused("quantisation-aware training is not supported"),
        section + "turbo_config.": _ONE_RANK,
    }


def _model(section: str) -> dict[str, Verdict]:
    return {
        section: _refused("not supported"),
        section + "path": _HONOURED,
        section + "hf_config_path": _FOLDER,
        section + "tokenizer_path": _FOLDER,
        section + "custom_chat_template": _FOLDER,
        section + "override_config": _FOLDER,
        section + "override_config.": _FOLDER,
        section + "override_config.attn_implementation": _GPU,
        section + "trust_remote_code": _CODE,
        section + "external_lib": _CODE,
        section + "use_shm": _refused("the policy is read from its folder"),
        section + "enable_gradient_checkpointing": _SPEED,
        section + "enable_activation_offload": _SPEED,
        section + "use_remove_padding": _SPEED,
        section + "lora": _LORA,
        section + "target_modules": _LORA,
        section + "exclude_modules": _LORA,
        section + "mtp.": _refused("multi-token prediction is not supported"),
        section + "use_liger": _refused("fused kernels are not supported"),
        section + "use_fused_kernels": _refused("fused kernels are not supported"),
        section + "fused_kernel_options.": _refused("fused kernels are not supported"),
        section + "tiled_mlp.": _refused("fused kernels are not supported"),
    }


RULES: dict[str, Verdict] = {
    "model_engine": _refused("only VERL's FSDP engine ('dp') is supported"),
    "actor_rollout_ref.hybrid_engine": _refused("the policy is served by a process of its own"),
    "actor_rollout_ref.nccl_timeout": _INERT,
    # the policy
    ACTOR: _HONOURED,
    ACTOR + "_target_": _refused("VERL's own class is used"),
    ACTOR + "rollout_n": _refused("set actor_rollout_ref.rollout.n"),
    ACTOR + "ppo_micro_batch_size": _BATCH_SIZE,
    ACTOR + "use_dynamic_bsz": _DYNAMIC,
    ACTOR + "ppo_max_token_len_per_gpu": _INERT,
    ACTOR + "freeze_vision_tower": _TEXT,
    ACTOR + "policy_loss._target_": _refused("VERL's own class is used"),
    ACTOR + "calculate_sum_pi_squared": _refused("no supported estimator reads it"),
    ACTOR + "use_prefix_grouper": _refused("not supported"),
    ACTOR + "use_torch_compile": _SPEED,
    ACTOR + "use_fused_kernels": _refused("fused kernels are not supported"),
    ACTOR + "use_remove_padding": _refused("set actor_rollout_ref.model.use_remove_padding"),
    ACTOR + "ulysses_sequence_parallel_size": _ONE_RANK,
    ACTOR + "pad_to_length": _PADDING,
    ACTOR + "checkpoint.": _CHECKPOINT,
    ACTOR + "profiler.": _PROFILER,
    ACTOR + "qat.": _refused("quantisation-aware training is not supported"),
    **_optimizer(ACTOR),
    **_engine(ACTOR + "fsdp_config."),
    **_model(MODEL),
    # the frozen policy that it may not leave far behind
    REFERENCE: _refused("the reference policy is built as the actor is"),
    REFERENCE + "log_prob_micro_batch_size_per_gpu": _HONOURED,
    REFERENCE + "log_prob_micro_batch_size": _BATCH_SIZE,
    REFERENCE + "log_prob_use_dynamic_bsz": _DYNAMIC,
    REFERENCE + "log_prob_max_token_len_per_gpu": _INERT,
    REFERENCE + "ulysses_sequence_parallel_size": _ONE_RANK,
    REFERENCE + "pad_to_length": _PADDING,
    REFERENCE + "profiler.": _PROFILER,
    REFERENCE + "use_torch_compile": _SPEED,
    REFERENCE + "entropy_": _INERT,  # nobody reads the reference's entropy
    **_engine(REFERENCE + "fsdp_config."),
    # values of tokens, for GAE
    CRITIC: _HONOURED,
    CRITIC + "_target_": _refused("VERL's own class is used"),
    CRITIC + "rollout_n": _refused("set actor_rollout_ref.rollout.n"),
    CRITIC + "ppo_micro_batch_size": _BATCH_SIZE,
    CRITIC + "forward_micro_batch_size": _BATCH_SIZE,
    CRITIC + "use_dynamic_bsz": _DYNAMIC,
    CRITIC + "ppo_max_token_len_per_gpu": _INERT,
    CRITIC + "forward_max_token_len_per_gpu": _INERT,
    CRITIC + "ulysses_sequence_parallel_size": _ONE_RANK,
    CRITIC + "checkpoint.": _CHECKPOINT,
    CRITIC + "profiler.": _PROFILER,
    **_optimizer(CRITIC),
    **_engine(CRITIC + "fsdp."),
    **_model(CRITIC + "model."),
    # rollouts and their server
    ROLLOUT: _refused("rollouts run in the pipeline's shards, not in VERL"),
    ROLLOUT + "n": _HONOURED,  # rollouts of one input
    ROLLOUT + "temperature": _HONOURED,
    ROLLOUT + "top_p": _HONOURED,
    ROLLOUT + "top_k": _HONOURED,
    ROLLOUT + "do_sample": _refused("training rollouts are sampled"),
    ROLLOUT + "log_prob_micro_batch_size": _BATCH_SIZE,
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": _HONOURED,  # null is the actor's
    ROLLOUT + "log_prob_use_dynamic_bsz": _DYNAMIC,
    ROLLOUT + "log_prob_max_token_len_per_gpu": _INERT,
    ROLLOUT + "logprobs_mode": _refused(
        "log-probs are compared at the sampling temperature: 'processed_logprobs' only"
    ),
    ROLLOUT + "calculate_log_probs": _refused("log-probs of rollouts are always recorded"),
    ROLLOUT + "multi_turn.": _refused("the agent decides its turns and tools"),
    ROLLOUT + "agent.": _refused("the agent is the run's"),
    ROLLOUT + "prompt_length": _refused("set data.max_prompt_length"),
    ROLLOUT + "response_length": _refused("set data.max_response_length"),
    ROLLOUT + "val_kwargs._target_": _refused("VERL's own class is used"),
    ROLLOUT + "val_kwargs.n": _HONOURED,
    ROLLOUT + "val_kwargs.temperature": _HONOURED,
    ROLLOUT + "val_kwargs.do_sample": _HONOURED,  # false is temperature 0
    ROLLOUT + "val_kwargs.top_p": _HONOURED,
    ROLLOUT + "val_kwargs.top_k": _HONOURED,
    ROLLOUT + "name": _SERVER,
    ROLLOUT + "gpu_memory_utilization": _SERVER,
    ROLLOUT + "tensor_model_parallel_size": _SERVER,
    ROLLOUT + "pipeline_model_parallel_size": _SERVER,
    ROLLOUT + "data_parallel_size": _SERVER,
    ROLLOUT + "dtype": _SERVER,
    ROLLOUT + "enforce_eager": _SERVER,
    ROLLOUT + "max_model_len": _SERVER,
    ROLLOUT + "max_num_seqs": _SERVER,
    ROLLOUT + "max_num_batched_tokens": _SERVER,
    ROLLOUT + "enable_chunked_prefill": _SERVER,
    ROLLOUT + "enable_prefix_caching": _SERVER,
    ROLLOUT + "scheduling_policy": _SERVER,
    ROLLOUT + "quantization": _SERVER,
    ROLLOUT + "seed": _refused("each call has a seed of its own"),
    ROLLOUT + "engine_kwargs.": _refused("the policy is served by vLLM or the embedded engine"),
    ROLLOUT + "engine_kwargs.vllm": _SERVER,
    # what is learned from
    "data.": _DATA,
    "data.train_batch_size": _HONOURED,  # inputs of one iteration
    "data.gen_batch_size": _refused("set data.train_batch_size"),
    "data.val_batch_size": _HONOURED,  # rows of one batch; every validation row is scored
    "data.val_max_samples": _HONOURED,  # validation rows that are scored; -1 is all of them
    "data.max_prompt_length": _HONOURED,
    "data.max_response_length": _HONOURED,  # also `max_tokens` of each model request
    "data.truncation": _HONOURED,  # of prompts; not set: agentlightning.truncation.prompt
    "data.filter_overlong_prompts": _refused("set agentlightning.truncation.prompt"),
    "data.filter_overlong_prompts_workers": _refused("set agentlightning.truncation.prompt"),
    "data.seed": _HONOURED,
    "data.shuffle": _HONOURED,
    "algorithm.": _HONOURED,
    "algorithm._target_": _refused("VERL's own class is used"),
    "algorithm.kl_ctrl._target_": _refused("VERL's own class is used"),
    "algorithm.filter_groups.": _refused(
        "set agentlightning.filter.equal_rewards; no inputs are sampled in place of a group"
    ),
    "algorithm.use_pf_ppo": _refused("rows are never resampled"),
    "algorithm.pf_ppo.": _refused("rows are never resampled"),
    "reward.": _REWARD,
    "reward_model.": _REWARD,
    "custom_reward_function.": _REWARD,
    "sandbox_fusion.": _REWARD,
    # the run
    "trainer.": _refused("a setting of VERL's trainer, which this pipeline replaces"),
    "trainer.total_training_steps": _HONOURED,  # iterations
    "trainer.total_epochs": _HONOURED,  # used where total_training_steps is null
    "trainer.val_before_train": _HONOURED,
    "trainer.test_freq": _HONOURED,  # not set: every iteration is validated
    "trainer.save_freq": _HONOURED,  # every iteration is kept, so every save_freq-th is
    "trainer.critic_warmup": _HONOURED,
    "trainer.balance_batch": _INERT,  # deals rows to ranks
    "trainer.nnodes": _ONE_RANK,
    "trainer.n_gpus_per_node": _HONOURED,  # 1; see `limits`
    "trainer.device": _refused("a GPU is used where there is one"),
    "trainer.logger": _refused("metrics are in the ledger"),
    "trainer.log_val_generations": _refused("every rollout is in the ledger"),
    "trainer.rollout_data_dir": _refused("every rollout is in the ledger"),
    "trainer.validation_data_dir": _refused("every rollout is in the ledger"),
    "trainer.project_name": _NAME,
    "trainer.experiment_name": _NAME,
    "trainer.resume_mode": _refused("a run goes on where its ledger ends"),
    "trainer.resume_from_path": _refused("a run goes on where its ledger ends"),
    "trainer.default_local_dir": _CHECKPOINT,
    "trainer.default_hdfs_dir": _CHECKPOINT,
    "trainer.max_actor_ckpt_to_keep": _CHECKPOINT,
    "trainer.max_critic_ckpt_to_keep": _CHECKPOINT,
    "trainer.v1.": _refused("a setting of VERL's trainer, which this pipeline replaces"),
    "distillation.": _refused("distillation is not supported"),
    "global_profiler.": _PROFILER,
    "ray_kwargs.": _ONE_RANK,
    "skip.": _refused("finished rollouts are never run again"),
    "transfer_queue.": _refused("data passes through the ledger"),
    # ours
    OURS: _HONOURED,
    OURS + "port": _refused("there is no server of VERL's; every process finds its own port"),
    OURS + "trace_aggregator.debug": _refused("breaks are classified and counted in any case"),
    OURS + "trace_aggregator.mismatch_log_dir": _refused(
        "breaks of trajectories are counted in each manifest, by class"
    ),
}
"""Verdicts by prefix; one that ends in a dot, or in the middle of a name, covers what follows."""

DIFFERENT: frozenset[str] = frozenset(
    {
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "actor_rollout_ref.rollout.agent.num_workers",
        "actor_rollout_ref.rollout.seed",
        "agentlightning.port",
        "data.prompt_key",
        "data.reward_fn_key",
        "data.train_files",
        "data.val_files",
        "reward.num_workers",
        "reward.reward_manager.name",
        "trainer.default_local_dir",
        "trainer.experiment_name",
        "trainer.logger",
        "trainer.project_name",
    }
)
"""Refused keys whose default of VERL, written out, asks for something that is not done here. The
defaults of other refused keys say what is so in any case: a feature that is off, or one rank."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "trainer.logger": ("console", ["console"], []),
    ROLLOUT + "tensor_model_parallel_size": (1,),
    ROLLOUT + "pipeline_model_parallel_size": (1,),
    ROLLOUT + "data_parallel_size": (1,),
    REFERENCE + "strategy": ("fsdp", "fsdp2"),
    **{
        section + "fsdp_size": (1, -1)
        for section in (
            ACTOR + "fsdp_config.",
            REFERENCE + "fsdp_config.",
            CRITIC + "fsdp.",
        )
    },
    **{
        section + "override_config.attn_implementation": ("sdpa",)
        for section in (MODEL, CRITIC + "model.")
    },
}
"""Values of refused keys that say what is so in any case."""

_PREFIXES = (
    *(prefix for prefix in RULES if prefix.endswith((".", "_"))),
    MODEL + "lora",
    CRITIC + "model.lora",
    ROLLOUT + "engine_kwargs.vllm",
)


@cache
def verdict(key: str) -> Verdict:
    """Return what becomes of a dotted key.

    Raises:
        KeyError: No rule covers it.
    """
    if key in RULES:
        return RULES[key]
    return RULES[max((p for p in _PREFIXES if key.startswith(p)), key=len)]


def refusal(key: str, *, gpu: bool) -> str | None:
    """Say why a key may not be set on a machine with, or without, a GPU, whatever its value; see
    `asks_for_nothing` for the values that are taken even so.

    Returns:
        One sentence without the key, or None where it may be.
    """
    found = verdict(key)
    allowed = found.fate in (Fate.HONOURED, Fate.SPEED)
    allowed = allowed or (gpu and found.fate in (Fate.GPU, Fate.SERVER))
    return None if allowed else found.reason


def asks_for_nothing(key: str, value: Any, *, is_default: bool, gpu: bool) -> bool:
    """Say whether the value of a key that `refusal` refuses says what is so in any case.

    So it is for a value in `HARMLESS`, and for VERL's default written out where VERL's default is
    what happens here too: a feature that is off, or one rank. It is not for keys in `DIFFERENT` and
    those of vLLM's launch, whose defaults ask for something.

    Args:
        key: Its dotted name.
        value: What the user wrote.
        is_default: Whether VERL's default is the same.
        gpu: Whether there is a GPU.
    """
    if value in HARMLESS.get(key, ()) or (key == "trainer.device" and value == "cpu" and not gpu):
        return True
    if not is_default or key in DIFFERENT or verdict(key).fate is Fate.SERVER:
        return False
    # On CPUs VERL computes in fp32, whatever `dtype` says.
    return gpu or not key.endswith((".fsdp_config.dtype", ".fsdp.dtype", "trainer.device"))
