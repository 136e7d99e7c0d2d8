"""The store over HTTP, under Agent Lightning's path."""

from agl_core.store.client import LightningStoreClient
from agl_core.store.server import LightningStoreServer

__all__ = ["LightningStoreClient", "LightningStoreServer"]
