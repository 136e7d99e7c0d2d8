"""Which reward each call and each rollout is trained on.

An agent may emit several rewards, each with several dimensions; `agl_core.adapter.rewards` decided
which call each belongs to. With rewards 0.2 on call 0 and a final 1.0 on call 1::

    final        every row 1.0             the rollout's value 1.0
    per_call     calls 0.2, 1.0            1.2
    discounted   calls 0.2 + d * 1.0, 1.0  0.2 + d * 1.0
    sum          every row 1.2             1.2
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from agl_core.trajectory.ragged import ranges, starts_of
from agl_core.trajectory.settings import BatchSettings


@dataclass(frozen=True, slots=True)
class Credit:
    """Rewards of C calls, float64."""

    call: np.ndarray
    """[C] reward of the call; the rollout's value where `on_rows`."""
    rollout: np.ndarray
    """[C] value of the call's rollout, for the statistics of its group."""
    on_rows: bool
    """Whether each row carries its rollout's value once, and not the rewards of its calls."""
    unusable: np.ndarray
    """[C] bool, where no reward of the rollout has a weight, or one is not finite."""


def assign_credit(triplets: pa.Table, settings: BatchSettings) -> Credit:
    """Return the reward of each call.

    A call that no reward belongs to has 0 under `per_call`: the sum of no rewards.

    Args:
        triplets: Schema `TRIPLETS`, ordered by `index`, then by call.
        settings: `credit`, `discount` and `reward_weights`.
    """
    _, rollout = np.unique(triplets["index"].to_numpy(), return_inverse=True)
    if settings.credit == "final" and settings.reward_weights is None:
        final = triplets["reward"].to_numpy()
        return Credit(final, final, on_rows=True, unusable=~np.isfinite(final))
    entries = _Entries.read(triplets, settings.reward_weights)
    num_rollouts = int(rollout.max(initial=-1)) + 1
    counts = {
        "final": entries.final,
        "sum": np.ones_like(entries.final),
        "per_call": entries.matched,
        "discounted": entries.matched,
    }[settings.credit]
    values = np.where(counts, entries.value, 0.0)
    by_call = np.bincount(entries.call, values, minlength=len(triplets))
    by_rollout = np.bincount(rollout, by_call, minlength=num_rollouts)
    weighted = np.bincount(rollout[entries.call[counts & entries.weighted]], minlength=num_rollouts)
    unusable = ((weighted == 0) | ~np.isfinite(by_rollout))[rollout]
    if settings.credit in ("final", "sum"):
        spread = by_rollout[rollout]
        return Credit(spread, spread, on_rows=True, unusable=unusable)
    if settings.credit == "discounted":
        by_call = _returns(by_call, rollout, settings.discount)
        first = np.flatnonzero(np.diff(rollout, prepend=-1))
        by_rollout = by_call[first]
    return Credit(by_call, by_rollout[rollout], on_rows=False, unusable=unusable)


def _returns(rewards: np.ndarray, rollout: np.ndarray, discount: float) -> np.ndarray:
    """Return `G_t = r_t + discount * G_(t + 1)` over the calls of each rollout."""
    returns = rewards.tolist()
    belongs = rollout.tolist()
    for call in range(len(returns) - 2, -1, -1):
        if belongs[call] == belongs[call + 1]:
            returns[call] += discount * returns[call + 1]
    return np.array(returns, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Entries:
    """E dimensions of emitted rewards, flat."""

    call: np.ndarray
    """[E] position of the call that keeps it."""
    value: np.ndarray
    """[E] float64, weighted."""
    weighted: np.ndarray
    """[E] bool, whether its dimension has a weight."""
    final: np.ndarray
    """[E] bool"""
    matched: np.ndarray
    """[E] bool"""

    @classmethod
    def read(cls, triplets: pa.Table, weights: dict[str, float] | None) -> "_Entries":
        column = triplets["rewards"].combine_chunks()
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        flat = column.flatten()
        value, primary, final, matched = (
            flat.field(name).to_numpy(zero_copy_only=False).astype(kind)
            for name, kind in (
                ("value", np.float64),
                ("primary", bool),
                ("final", bool),
                ("matched", bool),
            )
        )
        if weights is None:
            weight = primary.astype(np.float64)
            weighted = primary
        else:
            names = flat.field("name").dictionary_encode()
            known = np.array([weights.get(name, 0.0) for name in names.dictionary.to_pylist()])
            listed = np.array([name in weights for name in names.dictionary.to_pylist()])
            codes = names.indices.to_numpy(zero_copy_only=False)
            weight, weighted = (known[codes], listed[codes]) if len(codes) else (value, primary)
        value = np.where(weighted, value, 0.0) * weight
        return cls(np.repeat(np.arange(len(lengths)), lengths), value, weighted, final, matched)


def shuffle_rewards(triplets: pa.Table, seed: int) -> pa.Table:
    """Return the triplets with rewards dealt out at random between rollouts.

    The control of a learning curve: rewards keep their distribution and lose their cause. All
    rewards of a rollout stay together. They keep their places counted from the last call; where the
    other rollout has fewer calls, its first one takes the rest.

    Args:
        triplets: Schema `TRIPLETS`, ordered by `index`, then by call.
        seed: Of the permutation.
    """
    _, first, counts = np.unique(
        triplets["index"].to_numpy(), return_index=True, return_counts=True
    )
    donor = np.random.default_rng(seed).permutation(len(first))
    final = np.repeat(triplets["reward"].to_numpy()[first[donor]], counts)
    column = triplets["rewards"].combine_chunks()
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(lengths)
    place = ranges(np.zeros_like(counts), counts)  # of each call in its rollout
    missing = np.repeat(counts - counts[donor], counts)
    source = np.repeat(first[donor], counts) + place - missing
    has_source = place >= missing
    begins = np.where(place == 0, np.repeat(first[donor], counts), source)
    begins = np.where(has_source, begins, 0)
    stops = np.where(has_source, source, 0)
    starts = starts_of(lengths)
    new_starts = np.where(has_source, starts[begins], 0)
    new_lengths = np.where(has_source, ends[stops] - new_starts, 0)
    taken = column.flatten().take(pa.array(ranges(new_starts, new_lengths)))
    return _with_column(
        _with_column(triplets, "reward", pa.array(final, pa.float64())),
        "rewards",
        pa.ListArray.from_arrays(
            pa.array(np.concatenate([[0], np.cumsum(new_lengths)]), pa.int32()), taken
        ),
    )


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(
        place, table.schema.field(name), values.cast(table.schema.field(name).type)
    )
