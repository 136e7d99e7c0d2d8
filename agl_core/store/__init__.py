"""The store: which rollouts there are, who runs them, what they left.

`LightningStore` is the contract; algorithms and runners know nothing else of each other.
`InMemoryLightningStore` ends with its process, `SqliteLightningStore` is a file.
"""

from agl_core.store.attempt_table import Deadlines
from agl_core.store.base import UNSET, LightningStore, LightningStoreCapabilities, Unset
from agl_core.store.collection_based import CollectionBasedLightningStore
from agl_core.store.memory import InMemoryLightningStore
from agl_core.store.sqlite import SqliteLightningStore
from agl_core.store.threading import LightningStoreThreaded

__all__ = [
    "UNSET",
    "CollectionBasedLightningStore",
    "Deadlines",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreThreaded",
    "SqliteLightningStore",
    "Unset",
]
