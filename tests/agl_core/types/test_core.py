"""What the store's queries return is a sequence, as users of Agent Lightning were told."""

import random
from collections.abc import Sequence

from agl_core.store.memory import InMemoryLightningStore
from agl_core.types.core import EnqueueRolloutRequest, PaginatedResult


def _page(*items: str) -> PaginatedResult[str]:
    return PaginatedResult[str](items=items, limit=-1, offset=0, total=len(items))


def test_a_page_is_a_sequence_of_its_items():
    page = _page("a", "b", "a")
    assert isinstance(page, Sequence)
    assert list(page) == ["a", "b", "a"]
    assert list(reversed(page)) == ["a", "b", "a"]
    assert (len(page), page[-1], list(page[1:])) == (3, "a", ["b", "a"])
    assert (page.index("b"), page.count("a"), "b" in page, "c" in page) == (1, 2, True, False)


def test_random_picks_from_a_page():
    page = _page("a", "b", "c")
    assert sorted(random.sample(page, 3)) == ["a", "b", "c"]
    assert random.choice(page) in page


def test_an_empty_page_is_false():
    assert not _page()


async def test_pages_of_a_store_are_sequences():
    store = InMemoryLightningStore()
    requests = [EnqueueRolloutRequest(input=number) for number in range(4)]
    await store.enqueue_many_rollouts(requests)
    page = await store.query_rollouts()
    assert isinstance(page, Sequence)
    picked = random.sample(page, 4)
    assert sorted(rollout.input for rollout in picked) == [0, 1, 2, 3]
    assert page.index(picked[0]) == picked[0].input
    assert page.count(picked[0]) == 1
