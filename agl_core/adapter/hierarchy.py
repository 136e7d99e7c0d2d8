"""Where spans belong that float at the top of a trace: a pure function over their intervals.

Instrumentations that do not know of each other each start at the top, so the span of a model call
can lie beside that of the agent that made it. Time tells where it belongs, if anything does: a
floating span moves under the innermost span that encloses it, where all spans that enclose it are
nested in one another, in time and in the tree. Where two agents ran at once, both enclose the call
and neither is the other's parent, so it stays; so does a span that overlaps another one.

One sweep over the spans in order of start, O(n log n).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """One span of a tree, given in preorder: a parent comes before its children."""

    start: float
    """UTC epoch seconds; NaN if unknown, then the span neither moves nor takes in others."""
    end: float
    parent: int | None
    """Position of the parent; None for a floating span, one at the top."""


def find_enclosing(spans: Sequence[Interval]) -> dict[int, int]:
    """Return for each floating span that belongs elsewhere the position of its new parent.

    Args:
        spans: A forest in preorder.
    """
    last_below = _last_descendants(spans)
    tops = _tops(spans)
    groups = list(range(len(spans)))
    known = [i for i, span in enumerate(spans) if not math.isnan(span.start + span.end)]
    order = sorted(known, key=lambda i: (spans[i].start, -spans[i].end, i))
    started = _Started([spans[i].end for i in order])
    num_enclosing = [0] * len(spans)
    is_nested = [False] * len(spans)
    """Whether all that enclose a span are nested in one another and it is in the innermost."""
    moves: dict[int, int] = {}
    for rank, i in enumerate(order):
        num_enclosing[i], innermost_rank = started.count_ending_from(spans[i].end)
        started.add(rank, spans[i].end)
        if num_enclosing[i] == 0:
            is_nested[i] = True
            continue
        inner = order[innermost_rank]
        if num_enclosing[i] != num_enclosing[inner] + 1 or not is_nested[inner]:
            continue
        floats = spans[i].parent is None
        same = spans[i].start == spans[inner].start and spans[i].end == spans[inner].end
        if inner < i <= last_below[inner]:
            is_nested[i] = True
        elif floats and not same and _find(groups, tops[inner]) != i:
            moves[i] = inner
            groups[i] = _find(groups, tops[inner])
            is_nested[i] = True
    return moves


class _Started:
    """The spans that the sweep has passed, by their end (two Fenwick trees)."""

    def __init__(self, ends: Sequence[float]) -> None:
        self._ends = sorted({-end for end in ends})
        """Latest first, so that "ends no earlier" is a prefix."""
        self._counts = [0] * (len(self._ends) + 1)
        self._latest = [-1] * (len(self._ends) + 1)

    def add(self, rank: int, end: float) -> None:
        """Add a span; its rank in the sweep is higher than of those before."""
        node = bisect_left(self._ends, -end) + 1
        while node < len(self._counts):
            self._counts[node] += 1
            self._latest[node] = rank
            node += node & -node

    def count_ending_from(self, end: float) -> tuple[int, int]:
        """Return how many end at this time or later, and the rank of the last added of them."""
        node, count, latest = bisect_left(self._ends, -end) + 1, 0, -1
        while node > 0:
            count += self._counts[node]
            latest = max(latest, self._latest[node])
            node -= node & -node
        return count, latest


def _last_descendants(spans: Sequence[Interval]) -> list[int]:
    """Return the position of each span's last descendant, itself if it has none."""
    last = list(range(len(spans)))
    for i in range(len(spans) - 1, -1, -1):
        parent = spans[i].parent
        if parent is not None:
            last[parent] = max(last[parent], last[i])
    return last


def _tops(spans: Sequence[Interval]) -> list[int]:
    """Return the floating span that each span is below, itself if it floats."""
    tops: list[int] = []
    for i, span in enumerate(spans):
        tops.append(i if span.parent is None else tops[span.parent])
    return tops


def _find(groups: list[int], i: int) -> int:
    """Return the floating span that `i` is below after the moves so far (union-find)."""
    while groups[i] != i:
        groups[i] = groups[groups[i]]
        i = groups[i]
    return i
