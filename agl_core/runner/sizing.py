"""How many shards a set of rollouts is split into, and how many rollouts each runs at once."""

import math
from dataclasses import dataclass

from agl_core.config import RolloutSettings

MIN_SHARD, MAX_SHARD = 16, 512
"""Rollouts of a shard: a flow run costs about 5 CPU-seconds and 90 MB (Prefect 3.9.1, measured)."""
FEW_SHARDS, MANY_SHARDS = 4, 32


@dataclass(frozen=True, slots=True)
class Measured:
    """What earlier shards of the run took."""

    startup_seconds: float
    """From the request for a shard until its flow ran."""
    rollout_seconds: float
    """One rollout, all its attempts."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How a set is spread."""

    sizes: tuple[int, ...]
    """Rollouts of each shard."""
    at_once: int
    """Shards that run at the same time."""
    concurrency: int
    """Rollouts at once in each."""


def plan_shards(count: int, settings: RolloutSettings, measured: Measured | None) -> ShardPlan:
    """Return how a number of rollouts is split.

    On a work pool there are as many shards as run at least twice as long as they took to start, 4
    to 32 (4 where nothing was measured yet), of 16 to 512 rollouts. In process there is one for
    each 512.
    """
    if settings.shard_size is not None:
        num = math.ceil(count / settings.shard_size)
    elif settings.deployment is None:
        num = math.ceil(count / MAX_SHARD)
    else:
        wanted = FEW_SHARDS
        if measured is not None:
            alone = count * measured.rollout_seconds / settings.concurrency
            wanted = math.ceil(alone / max(2 * measured.startup_seconds, 1.0))
        wanted = min(max(wanted, FEW_SHARDS), MANY_SHARDS, settings.max_shards)
        num = max(min(wanted, count // MIN_SHARD), math.ceil(count / MAX_SHARD), 1)
    in_flight = settings.max_in_flight
    at_once = max(min(num, settings.max_shards, in_flight or num), 1)
    concurrency = settings.concurrency
    if in_flight is not None:
        concurrency = min(concurrency, in_flight // at_once)
    small, larger = divmod(count, max(num, 1))
    return ShardPlan(
        sizes=tuple(small + (place < larger) for place in range(num)),
        at_once=at_once,
        concurrency=concurrency,
    )
