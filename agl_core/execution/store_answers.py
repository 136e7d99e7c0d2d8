"""A store elsewhere may not be there yet."""

import asyncio
import logging
import time

from agl_core.errors import ConfigError, TransientError
from agl_core.store.base import LightningStore

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5


async def await_answer(store: LightningStore, timeout_seconds: float) -> None:
    """Wait until a store answers.

    Args:
        store: Asked for its statistics.
        timeout_seconds: How long.

    Raises:
        TransientError: It did not, in time.
        ValueError: It refuses: another run's, or the token is missing.
    """
    address = getattr(store, "server_address", type(store).__name__)
    until = time.monotonic() + timeout_seconds
    is_first = True
    while True:
        try:
            async with asyncio.timeout(max(1.0, until - time.monotonic())):
                await store.statistics()
            return
        except (TransientError, TimeoutError) as error:
            if time.monotonic() >= until:
                raise TransientError(
                    f"no store answers at {address} within {timeout_seconds:g} s; start the "
                    "process with the algorithm, or `agl store`, and see AGL_SERVER_HOST and "
                    f"AGL_SERVER_PORT here: {error}"
                ) from error
            if is_first:
                logger.warning("waiting up to %g s for the store at %s", timeout_seconds, address)
            is_first = False
        await asyncio.sleep(_PAUSE_SECONDS)


def check_shared(store: LightningStore) -> None:
    """Check that a store that is not served can be used by other processes.

    Raises:
        ConfigError: It lives in this one.
    """
    if not store.capabilities.get("zero_copy", False):
        raise ConfigError(
            f"{type(store).__name__} lives in this process, and runners are others: let it be "
            "managed (managed_store, AGL_MANAGED_STORE), or use SqliteLightningStore or "
            "LightningStoreClient"
        )
