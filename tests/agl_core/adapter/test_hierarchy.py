import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from agl_core.adapter.hierarchy import Interval, find_enclosing


def at(start: float, end: float, parent: int | None = None) -> Interval:
    return Interval(start, end, parent)


def test_a_floating_span_moves_under_the_innermost_one_around_it():
    spans = [at(0, 10), at(1, 9, parent=0), at(2, 8, parent=1), at(3, 4)]
    assert find_enclosing(spans) == {3: 2}


def test_a_span_that_two_concurrent_ones_enclose_stays():
    assert find_enclosing([at(0, 10), at(1, 11), at(2, 3)]) == {}


def test_a_span_that_concurrent_siblings_enclose_stays():
    spans = [at(0, 20), at(1, 10, parent=0), at(2, 12, parent=0), at(3, 4)]
    assert find_enclosing(spans) == {}


def test_a_span_that_only_one_of_two_overlapping_ones_encloses_moves():
    assert find_enclosing([at(0, 10), at(8, 14), at(11, 12)]) == {2: 1}


def test_a_span_that_starts_a_moment_too_early_stays():
    assert find_enclosing([at(0, 10), at(-0.001, 3)]) == {}


def test_a_span_with_the_same_times_stays():
    assert find_enclosing([at(0, 10), at(0, 10)]) == {}


def test_parent_and_child_with_the_same_times_take_in_a_floating_span():
    assert find_enclosing([at(0, 10), at(0, 10, parent=0), at(2, 3)]) == {2: 1}


def test_floating_spans_nest_in_one_another():
    assert find_enclosing([at(2, 3), at(1, 4), at(0, 5)]) == {0: 1, 1: 2}


def test_spans_with_a_parent_never_move():
    assert find_enclosing([at(0, 1), at(5, 6, parent=0), at(4, 7)]) == {}


def test_a_span_never_moves_under_one_of_its_own():
    assert find_enclosing([at(5, 6), at(4, 7, parent=0)]) == {}


def test_no_circle_arises_through_a_span_moved_before():
    # 3, below 2, takes in 0; then 1, below 0, encloses 2, but 2 is above it by now.
    spans = [at(5, 6), at(10, 20, parent=0), at(11, 12), at(4, 7, parent=2)]
    assert find_enclosing(spans) == {0: 3}


def test_spans_without_times_stay_and_take_in_nothing():
    assert find_enclosing([at(math.nan, 10), at(1, math.nan), at(2, 3)]) == {}


@st.composite
def forests(draw: st.DrawFn) -> list[Interval]:
    """Random forests in preorder, with few distinct times so that ties and overlaps abound."""
    size = draw(st.integers(1, 12))
    spans: list[Interval] = []
    path: list[int] = []
    for position in range(size):
        depth = draw(st.integers(0, len(path)))
        path = path[:depth]
        start = draw(st.integers(0, 8))
        end = start + draw(st.integers(0, 6))
        spans.append(at(start, end, path[-1] if path else None))
        path.append(position)
    return spans


def repair_slowly(spans: list[Interval]) -> dict[int, int]:
    """The rule as it is written, comparing all with all."""
    parents = {i: span.parent for i, span in enumerate(spans)}
    moves: dict[int, int] = {}

    def key(i: int) -> tuple[float, float, int]:
        return spans[i].start, -spans[i].end, i

    def ancestors(i: int, tree: dict[int, int | None]) -> list[int]:
        found: list[int] = []
        while (above := tree[i]) is not None:
            found.append(above)
            i = above
        return found

    def encloses(i: int, j: int) -> bool:
        return key(i) < key(j) and spans[i].end >= spans[j].end

    recorded = dict(parents)
    for i in sorted(parents, key=key):
        if spans[i].parent is not None:
            continue
        around = sorted((j for j in parents if j != i and encloses(j, i)), key=key)
        nested_in_time = all(encloses(a, b) for n, a in enumerate(around) for b in around[n + 1 :])
        nested_in_tree = all(
            a in ancestors(b, recorded) or moves.get(b) == a for a, b in itertools.pairwise(around)
        )
        if not around or not nested_in_time or not nested_in_tree:
            continue
        inner = around[-1]
        same = (spans[inner].start, spans[inner].end) == (spans[i].start, spans[i].end)
        if not same and inner != i and i not in ancestors(inner, parents):
            moves[i] = parents[i] = inner
    return moves


@given(forests())
def test_the_sweep_agrees_with_comparing_all_with_all(spans: list[Interval]):
    assert find_enclosing(spans) == repair_slowly(spans)


@given(forests())
def test_every_span_still_ends_at_a_top(spans: list[Interval]):
    parents = {i: span.parent for i, span in enumerate(spans)} | find_enclosing(spans)
    for i in parents:
        steps = 0
        while (above := parents[i]) is not None:
            i, steps = above, steps + 1
            assert steps <= len(spans)


@given(forests())
def test_a_span_moves_only_into_one_that_encloses_it(spans: list[Interval]):
    for i, inner in find_enclosing(spans).items():
        assert spans[i].parent is None
        assert spans[inner].start <= spans[i].start
        assert spans[inner].end >= spans[i].end
