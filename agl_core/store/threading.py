"""A store that any thread may use, around one that only the tasks of one event loop may."""

import asyncio
import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from agl_core.errors import StoreError
from agl_core.store.base import LightningStore, LightningStoreCapabilities
from agl_core.store.older import with_later_methods
from agl_core.store.waiting import check_timeout
from agl_core.types.core import Rollout

_WAIT_POLL_SECONDS = 0.1


class LightningStoreThreaded(LightningStore):
    """Makes a store usable from any thread and event loop.

    A store that is thread-safe and async-safe is called where its caller is. Any other lives in an
    event loop of its own, on a thread of its own, and calls are passed to it; where it is not
    async-safe, one after the other. `wait_for_rollouts` then asks again and again, so that what it
    waits for can happen.

    Args:
        store: What is wrapped; closed with this one. Calls that it then still works on, and later
            ones, raise `StoreError`.
    """

    def __init__(self, store: LightningStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._target = with_later_methods(store)
        is_async_safe = store.capabilities.get("async_safe", False)
        self._one_at_a_time = None if is_async_safe else asyncio.Lock()
        if not (is_async_safe and store.capabilities.get("thread_safe", False)):
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="agl-store-threaded", daemon=True
            )
            self._thread.start()

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Those of the store, and thread-safe and async-safe."""
        return {**self.store.capabilities, "thread_safe": True, "async_safe": True}

    def otlp_traces_endpoint(self) -> str:
        """Return the store's."""
        return self.store.otlp_traces_endpoint()

    async def close(self) -> None:
        """Close the store and end the thread."""
        if self._loop is None:
            await self.store.close()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            end = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            await asyncio.wrap_future(end)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        try:
            await self.store.close()
        finally:
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _call(
        self, method: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        if self._loop is None:
            return await method(*args, **kwargs)
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed")
            call = asyncio.run_coroutine_threadsafe(
                self._in_turn(method, *args, **kwargs), self._loop
            )
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):
                raise StoreError("the store is closed") from None
            raise

    async def _in_turn(
        self, method: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of the store, alone where it is not async-safe."""
        if self._one_at_a_time is None:
            return await method(*args, **kwargs)
        async with self._one_at_a_time:
            return await method(*args, **kwargs)

    async def wait_for_rollouts(
        self,
        *,
        rollout_ids: Sequence[str],
        timeout: float | None = None,  # noqa: ASYNC109 - Agent Lightning's signature
    ) -> list[Rollout]:
        """Wait until these rollouts have ended and return those that have."""
        wait = self._target.wait_for_rollouts
        if self._one_at_a_time is None:
            return await self._call(wait, rollout_ids=rollout_ids, timeout=timeout)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            ended = await self._call(wait, rollout_ids=rollout_ids, timeout=0)
            left = math.inf if deadline is None else deadline - time.monotonic()
            if len(ended) == len(set(rollout_ids)) or left <= 0:
                return ended
            await asyncio.sleep(min(left, _WAIT_POLL_SECONDS))


def _pass_on(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(getattr(LightningStore, name))
    async def method(self: LightningStoreThreaded, *args: Any, **kwargs: Any) -> Any:
        return await self._call(getattr(self._target, name), *args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return method


for _name, _method in inspect.getmembers(LightningStore, inspect.iscoroutinefunction):
    if _name not in vars(LightningStoreThreaded):
        setattr(LightningStoreThreaded, _name, _pass_on(_name))
