"""Requests to a Prefect server that may be away for a while, to be started again, say."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
from tenacity import (
    AsyncRetrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PATIENCE_SECONDS = 60.0


async def patiently(call: Callable[[], Awaitable[Result]]) -> Result:
    """Return what a call returns that asks the server; repeat it while the server is away.

    Prefect's clients wait themselves once they have been connected; a new one does not.

    Args:
        call: May be repeated: what it did before is found, not done twice.

    Raises:
        httpx.TransportError: The server was away for `PATIENCE_SECONDS`.
    """
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(httpx.TransportError),
        stop=stop_after_delay(PATIENCE_SECONDS),
        wait=wait_exponential(max=5.0),
        before_sleep=before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await call()
    raise AssertionError("tenacity returns or raises")
