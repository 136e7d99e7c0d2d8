"""Which reward a row is trained on."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def shuffle_rewards(triplets: pa.Table, seed: int) -> pa.Table:
    """Return the triplets with rewards dealt out at random between rollouts.

    The control of a learning curve: rewards keep their distribution and lose their cause.

    Args:
        triplets: Schema `TRIPLETS`; every triplet of a rollout carries the same reward.
        seed: Of the permutation.
    """
    rollouts, first, position = np.unique(
        triplets["index"].to_numpy(), return_index=True, return_inverse=True
    )
    rewards = triplets["reward"].to_numpy()[first]
    dealt = np.random.default_rng(seed).permutation(rewards)
    assert len(dealt) == len(rollouts)
    column = triplets.schema.get_field_index("reward")
    return triplets.set_column(column, "reward", pc.cast(pa.array(dealt[position]), pa.float64()))
