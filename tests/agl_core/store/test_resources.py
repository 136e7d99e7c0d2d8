import re

import pytest

from agl_core.store import CollectionBasedLightningStore as Store
from tests.agl_core.store.builders import make_resources
from tests.agl_core.store.conftest import Clock


async def test_added_resources_get_an_id_and_are_the_latest(store: Store, clock: Clock):
    assert await store.get_latest_resources() is None
    first = await store.add_resources(make_resources("a {x}"))
    assert re.fullmatch(r"rs-[0-9a-f]{12}", first.resources_id)
    assert (first.version, first.create_time, first.update_time) == (1, clock.now, clock.now)
    assert first.resources == make_resources("a {x}")
    second = await store.add_resources(make_resources())
    assert second.resources_id != first.resources_id
    assert await store.get_latest_resources() == second
    assert await store.get_resources_by_id(first.resources_id) == first
    assert await store.get_resources_by_id("rs-0") is None


async def test_an_update_is_the_next_version_and_the_latest(store: Store, clock: Clock):
    first = await store.add_resources(make_resources("a"))
    other = await store.add_resources(make_resources("b"))
    clock.sleep(5)
    updated = await store.update_resources(first.resources_id, make_resources("c"))
    assert (updated.version, updated.create_time) == (2, first.create_time)
    assert updated.update_time == clock.now
    assert await store.get_latest_resources() == updated
    assert await store.get_resources_by_id(other.resources_id) == other
    new = await store.update_resources("rs-mine", make_resources())
    assert (new.resources_id, new.version) == ("rs-mine", 1)


async def test_resources_are_found_by_id_sorted_and_paged(store: Store, clock: Clock):
    for name in ("rs-a1", "rs-a2", "rs-b1"):
        clock.sleep(1)
        await store.update_resources(name, make_resources())
    await store.update_resources("rs-a1", make_resources())

    async def found(**arguments: object) -> list[str]:
        page = await store.query_resources(**arguments)  # pyright: ignore[reportArgumentType]
        return [update.resources_id for update in page]

    assert await found() == ["rs-a1", "rs-a2", "rs-b1"]
    assert await found(resources_id="rs-a2") == ["rs-a2"]
    assert await found(resources_id_contains="a") == ["rs-a1", "rs-a2"]
    assert await found(resources_id="rs-a2", resources_id_contains="b") == []
    assert await found(sort_by="version", sort_order="desc", limit=1) == ["rs-a1"]
    assert await found(sort_by="create_time", sort_order="desc", offset=1) == ["rs-a2", "rs-a1"]
    with pytest.raises(ValueError, match=r"allowed fields are: .*version"):
        await found(sort_by="resources")
