"""Which train rows an iteration takes: every row once an epoch, in a seeded order."""

import random

import numpy as np


def rows_of_step(step: int, *, size: int, batch_size: int, seed: int | None) -> list[int]:
    """Return the train rows of one iteration; the same arguments give the same rows.

    Batches follow each other through the epochs without a gap. A batch that crosses into the next
    epoch takes there rows that it does not have yet, so no row comes twice in a batch, nor in an
    epoch.

    Args:
        step: Number of the iteration, from 0.
        size: Rows of the dataset, at least `batch_size`.
        batch_size: Rows of each iteration.
        seed: Seeds the order of each epoch; None keeps the dataset's.

    Returns:
        `batch_size` different rows.
    """
    first, last = step * batch_size, (step + 1) * batch_size - 1
    before: list[int] = []
    order = _epoch_order(0, size, seed, [], 0)
    for epoch in range(1, last // size + 1):
        # rows of the epoch before that the batch across the border has, and rows it still needs
        carried = (epoch * size) % batch_size
        before = order
        shared = before[size - carried :] if carried else []
        order = _epoch_order(epoch, size, seed, shared, batch_size - carried if carried else 0)
    start = first % size
    if first // size == last // size:
        return order[start : start + batch_size]
    return before[start:] + order[: batch_size - (size - start)]


def validation_rows(size: int, max_samples: int, *, seed: int | None) -> list[int]:
    """Return the validation rows that are scored, the same ones in every iteration.

    As VERL's dataset does, where `max_samples` are fewer than all: a random choice where the data
    is shuffled, else the first ones.

    Args:
        size: Rows of the validation dataset.
        max_samples: Rows to score; all where it is not above 0.
        seed: Of the choice; None takes the first rows.
    """
    if not 0 < max_samples < size:
        return list(range(size))
    if seed is None:
        return list(range(max_samples))
    return np.random.default_rng(seed).choice(size, size=max_samples, replace=False).tolist()


def _epoch_order(
    epoch: int, size: int, seed: int | None, shared: list[int], needed: int
) -> list[int]:
    """Return one epoch's order, in which the first `needed` rows are none of the shared ones."""
    order = list(range(size))
    if seed is not None:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    if not needed:
        return order
    taken = set(shared)
    head = [row for row in order if row not in taken][:needed]
    chosen = set(head)
    return head + [row for row in order if row not in chosen]
