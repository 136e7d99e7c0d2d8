"""The same claims for the store in memory, the one on disk, and one behind a server, with a clock
that tests turn.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from agl_core.store import (
    CollectionBasedLightningStore,
    InMemoryLightningStore,
    LightningStoreServer,
    SqliteLightningStore,
)
from agl_core.store.base import LightningStore

OpenStore = Callable[..., CollectionBasedLightningStore]


class Clock:
    """A time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "http"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[OpenStore]:
    """Opens a store with given settings; closed at the end."""
    if request.param == "http" and request.node.get_closest_marker("in_process"):
        pytest.skip("looks inside the store")
    opened: list[LightningStore] = []

    def open_one(**settings: object) -> CollectionBasedLightningStore:
        if request.param == "sqlite":
            path = tmp_path / f"{len(opened)}.db"
            store = SqliteLightningStore(path, **settings)  # pyright: ignore[reportArgumentType]
        else:
            store = InMemoryLightningStore(**settings)  # pyright: ignore[reportArgumentType]
        opened.append(store)
        return serve(store) if request.param == "http" else store

    def serve(store: LightningStore) -> CollectionBasedLightningStore:
        server = LightningStoreServer(store, port=0)
        with ThreadPoolExecutor(1) as pool:  # a fixture's function cannot await
            pool.submit(asyncio.run, server.start()).result()
        client = server.client()
        opened[-1:] = [client, server]
        return cast(CollectionBasedLightningStore, client)

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
def store(open_store: OpenStore, clock: Clock) -> CollectionBasedLightningStore:
    """Looks for expired attempts before every call, by the test's clock."""
    return open_store(clock=clock, scan_debounce_seconds=0)
