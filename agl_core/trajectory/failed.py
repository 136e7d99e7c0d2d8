"""What rollouts that failed mean for a batch, by the run's settings."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.failures import FailureSettings
from agl_core.types.outcome import FailureKind


def rewarded_outcomes(outcomes: pa.Table, settings: FailureSettings) -> pa.Table:
    """Return the outcomes as the batch is built from them.

    Where the settings have 0 for a missing reward, such a rollout counts as succeeded with reward 0
    here, and here alone: the record keeps its kind and no reward.

    Args:
        outcomes: Schema `OUTCOMES`.
        settings: Of the run.
    """
    if settings.no_reward.then != "zero":
        return outcomes
    is_zero = pc.equal(outcomes["kind"], FailureKind.NO_REWARD.value)
    kinds = pc.if_else(is_zero, FailureKind.SUCCEEDED.value, outcomes["kind"])
    rewards = pc.if_else(is_zero, 0.0, outcomes["reward"])
    replaced = outcomes.set_column(outcomes.schema.get_field_index("kind"), "kind", kinds)
    return replaced.set_column(outcomes.schema.get_field_index("reward"), "reward", rewards)


def failed_groups(outcomes: pa.Table, groups: pa.Table, settings: FailureSettings) -> np.ndarray:
    """Return the groups that lost a rollout in a way that drops the group whole, int32.

    Args:
        outcomes: Schema `OUTCOMES`, every attempt.
        groups: Columns `index` and `group` of the requests.
        settings: Of the run.
    """
    policies = settings.policies()
    kinds = [kind.value for kind, policy in policies.items() if policy.then == "drop_group"]
    failed = pc.and_(outcomes["final"], pc.is_in(outcomes["kind"], pa.array(kinds, pa.string())))
    members = outcomes.filter(failed)["index"].combine_chunks()
    return groups.filter(pc.is_in(groups["index"], members))["group"].unique().to_numpy()
