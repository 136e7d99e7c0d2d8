"""Which train rows an iteration takes: every row once an epoch, in a seeded order."""

import random


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
