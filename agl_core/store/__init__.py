"""The store: which rollouts there are, who runs them, what they left.

`LightningStore` is the contract; algorithms and runners know nothing else of each other.
`InMemoryLightningStore` ends with its process, `SqliteLightningStore` is a file;
`LightningStoreServer` serves one to other processes, whose `LightningStoreClient` is a store too.
"""

from typing import TYPE_CHECKING, Any

from agl_core.store.attempt_table import Deadlines
from agl_core.store.base import (
    UNSET,
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Unset,
)
from agl_core.store.collection_based import CollectionBasedLightningStore
from agl_core.store.memory import InMemoryLightningStore
from agl_core.store.sqlite import SqliteLightningStore
from agl_core.store.threading import LightningStoreThreaded

if TYPE_CHECKING:  # loaded when they are used: not every store is reached over HTTP
    from agl_core.store.client import LightningStoreClient
    from agl_core.store.server import LightningStoreServer

__all__ = [
    "UNSET",
    "CollectionBasedLightningStore",
    "Deadlines",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "SqliteLightningStore",
    "Unset",
]


def __getattr__(name: str) -> Any:
    if name == "LightningStoreClient":
        from agl_core.store.client import LightningStoreClient

        return LightningStoreClient
    if name == "LightningStoreServer":
        from agl_core.store.server import LightningStoreServer

        return LightningStoreServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
