"""Composing VERL's configuration: what is merged, what is refused, what is said about it."""

import subprocess
import sys

import pytest

from agl_core.algorithm.verl.config import compose, normalise, total_steps
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
        ACTOR + "use_kl_loss": True,
        "algorithm.gamma": 0.9,
        "actor_rollout_ref.rollout.top_p": 0.9,
    }
    with pytest.raises(ConfigError) as caught:
        compose(SETTINGS | refused)
    message = str(caught.value)
    assert all(key in message for key in refused)
    assert "lora_rank=8: not supported yet" in message
    assert "reference policy" in message


def test_an_unsupported_key_at_verls_default_is_accepted():
    same = {ACTOR + "use_kl_loss": False, "actor_rollout_ref.model.lora_rank": 0}
    compose(SETTINGS | same | {"actor_rollout_ref.rollout.top_p": 1.0, "algorithm.gamma": 1.0})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algorithm.adv_estimator", "rloo", "other estimators"),
        ("algorithm.adv_estimator", "gae", "must be set"),
        (ACTOR + "ppo_micro_batch_size_per_gpu", None, "must be set"),
        ("data.train_batch_size", 0, "above 0"),
        (ACTOR + "ppo_epochs", 1.5, "whole number"),
        (ACTOR + "optim.lr", "fast", "could not convert"),
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
