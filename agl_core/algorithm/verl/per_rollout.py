"""A loss in which every rollout counts once, however many rows and tokens it has.

VERL's losses average over tokens or over rows. The policy losses of `estimators.SCALED` are
proportional to a positive factor on the advantages, so factors on these turn that average into one
over rollouts. For rollouts of 4 and 1 tokens, `token-mean` and the losses `l` of tokens::

    VERL         (l1 + l2 + l3 + l4 + l5) / 5
    per rollout  ((l1 + l2 + l3 + l4) / 4 + l5) / 2      factors 5/8 and 5/2

The factors are of the whole batch; a mini-batch is averaged over its own tokens or rows, as by
VERL without them. A KL penalty in the loss and an entropy bonus have no advantage, so they are
refused beside it (`limits.py`).
"""

import numpy as np

from agl_core.algorithm.verl.batch import RowBatch
from agl_core.algorithm.verl.limits import PER_ROLLOUT_MODES


def rollout_weights(batch: RowBatch, loss_agg_mode: str) -> np.ndarray:
    """Return [R] float32, the factor on each response token's advantage.

    Args:
        batch: The rows; those without a token of loss weight count for nothing.
        loss_agg_mode: `token-mean` gives each rollout the mean over its tokens, and
            `seq-mean-token-mean` the mean over its rows of their means.
    """
    assert loss_agg_mode in PER_ROLLOUT_MODES
    tokens = batch.weighted_tokens()
    units = tokens if loss_agg_mode == "token-mean" else (tokens > 0).astype(np.int64)
    _, rollout = np.unique(batch.rollout, return_inverse=True)
    of_rollout = np.bincount(rollout, units)
    num_rollouts = np.count_nonzero(of_rollout)
    per_row = units.sum() / (max(1, num_rollouts) * np.maximum(of_rollout, 1)[rollout])
    return np.repeat(per_row, batch.response_lengths).astype(np.float32)
