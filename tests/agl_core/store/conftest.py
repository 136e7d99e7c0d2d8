"""The same claims for the store in memory and the one on disk, with a clock that tests turn."""

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from agl_core.store import (
    CollectionBasedLightningStore,
    InMemoryLightningStore,
    SqliteLightningStore,
)

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


@pytest.fixture(params=["memory", "sqlite"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[OpenStore]:
    """Opens a store with given settings; closed at the end."""
    opened: list[CollectionBasedLightningStore] = []

    def open_one(**settings: object) -> CollectionBasedLightningStore:
        if request.param == "memory":
            store = InMemoryLightningStore(**settings)  # pyright: ignore[reportArgumentType]
        else:
            path = tmp_path / f"{len(opened)}.db"
            store = SqliteLightningStore(path, **settings)  # pyright: ignore[reportArgumentType]
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
def store(open_store: OpenStore, clock: Clock) -> CollectionBasedLightningStore:
    """Looks for expired attempts before every call, by the test's clock."""
    return open_store(clock=clock, scan_debounce_seconds=0)
