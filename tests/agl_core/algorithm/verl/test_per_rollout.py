"""Factors that let every rollout count once."""

import numpy as np
import pytest

from agl_core.algorithm.verl.batch import read_rows
from agl_core.algorithm.verl.config import compose
from agl_core.algorithm.verl.overrides import normalise
from agl_core.algorithm.verl.per_rollout import rollout_weights
from agl_core.errors import ConfigError
from tests.agl_core.algorithm.verl.conftest import SETTINGS, UNEVEN, make_rows

ACTOR = "actor_rollout_ref.actor."
PER_ROLLOUT = "agentlightning.loss.per_rollout"


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_factors_of_each_rollout_add_up_to_the_same_and_are_one_on_average(mode: str):
    batch = read_rows(make_rows(UNEVEN))
    weights = rollout_weights(batch, mode)
    if mode == "token-mean":
        of_token, total = batch.response_mask.astype(float), batch.response_mask.sum()
    else:
        of_token = batch.response_mask / np.repeat(batch.weighted_tokens(), batch.response_lengths)
        total = len(batch)
    rollout = np.repeat(batch.rollout, batch.response_lengths)
    sums = np.bincount(rollout, weights * of_token)
    assert len(sums) == 5
    assert sums == pytest.approx(total / 5)


def test_rows_without_weight_count_for_nothing():
    batch = read_rows(make_rows(UNEVEN))
    masked = batch.response_mask.copy()
    masked[: batch.response_lengths[0]] = 0  # the first of two rows of rollout 0
    batch.response_mask[:] = masked
    weights = rollout_weights(batch, "seq-mean-token-mean")
    starts = np.cumsum(batch.response_lengths) - batch.response_lengths
    assert weights[starts[1]] == weights[starts[2]], "it has one row that counts, as rollout 1"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({ACTOR + "loss_agg_mode": "token-sum"}, "is no mean"),
        ({ACTOR + "policy_loss.loss_mode": "dro", ACTOR + "policy_loss.dro_beta": 1.0}, "dro is"),
        ({ACTOR + "policy_loss.loss_mode": "sapo"}, "sapo always takes"),
        ({ACTOR + "use_kl_loss": True}, "use_kl_loss has no advantage"),
        ({ACTOR + "entropy_coeff": 0.01}, "the bonus of"),
        ({PER_ROLLOUT: "yes"}, "expected true or false"),
    ],
)
def test_what_the_factors_do_not_reach_is_refused(settings: dict, problem: str):
    with pytest.raises(ConfigError, match=problem):
        compose(normalise(SETTINGS) | {PER_ROLLOUT: True} | settings)
