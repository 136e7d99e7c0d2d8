"""What algorithms over a store are written with: its parts as arguments, batches of a dataset."""

import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from agl_core.algorithm.base import Algorithm
from agl_core.errors import ConfigError
from agl_core.store.base import LightningStore
from agl_core.types.core import Dataset

if TYPE_CHECKING:  # only named; it loads a web server
    from agl_core.llm_proxy.proxy import LLMProxy

P = ParamSpec("P")
R = TypeVar("R")
RowT = TypeVar("RowT")
AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm)


def with_store(
    method: Callable[Concatenate[AlgorithmT, LightningStore, P], R],
) -> Callable[Concatenate[AlgorithmT, P], R]:
    """Give a method, async or not, the algorithm's store as its first argument after `self`.

    Calling it raises ValueError where none is set.
    """
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(self: AlgorithmT, *args: P.args, **kwargs: P.kwargs) -> Any:
            return await method(self, self.get_store(), *args, **kwargs)

        return call_async  # pyright: ignore[reportReturnType] - R is a coroutine here

    @functools.wraps(method)
    def call(self: AlgorithmT, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self, self.get_store(), *args, **kwargs)

    return call


def with_llm_proxy(
    required: bool = False, auto_start: bool = True
) -> Callable[
    ["Callable[Concatenate[AlgorithmT, LLMProxy | None, P], Awaitable[R]]"],
    Callable[Concatenate[AlgorithmT, P], Awaitable[R]],
]:
    """Give an async method the algorithm's proxy, or None, as its first argument after `self`.

    Args:
        required: Whether calling the method without a proxy raises ValueError.
        auto_start: Whether a proxy that does not run is started before the method and stopped
            after it.
    """

    def decorate(
        method: "Callable[Concatenate[AlgorithmT, LLMProxy | None, P], Awaitable[R]]",
    ) -> Callable[Concatenate[AlgorithmT, P], Awaitable[R]]:
        if not inspect.iscoroutinefunction(method):
            raise TypeError(f"with_llm_proxy is for async methods; {method!r} is none")

        @functools.wraps(method)
        async def call(self: AlgorithmT, *args: P.args, **kwargs: P.kwargs) -> R:
            proxy = self.get_llm_proxy()
            if proxy is None and required:
                raise ValueError(
                    f"LLM proxy is required but not configured: {type(self).__name__} needs an "
                    "LLMProxy: give the Trainer one (llm_proxy=)"
                )
            is_ours = proxy is not None and auto_start and not proxy.is_running()
            if proxy is None or not is_ours:
                return await method(self, proxy, *args, **kwargs)
            await proxy.start()
            try:
                return await method(self, proxy, *args, **kwargs)
            finally:
                await proxy.stop()

        return call

    return decorate


def batch_iter_over_dataset(
    dataset: Dataset[RowT], batch_size: int, *, seed: int | None = None
) -> Iterator[list[RowT]]:
    """Return batches without end: shuffled passes over the dataset, each row once a pass.

    A batch may begin in one pass and end in the next, with rows there that it does not have yet: no
    row comes twice in a batch. A dataset that is no larger than a batch is each batch as a whole,
    in its own order.

    Args:
        dataset: Rows by position.
        batch_size: Rows of a batch.
        seed: Of the order; None for another order each time.

    Raises:
        ConfigError: The dataset is empty, or a batch would be.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size cannot be {batch_size}: give at least 1")
    if len(dataset) == 0:
        raise ConfigError("the dataset has no rows to make batches of")
    return _batches(dataset, batch_size, random.Random(seed))


def _batches(
    dataset: Dataset[RowT], batch_size: int, source: random.Random
) -> Iterator[list[RowT]]:
    size = len(dataset)
    if batch_size >= size:
        while True:
            yield [dataset[row] for row in range(size)]
    rows: list[int] = []
    while True:
        if len(rows) < batch_size:
            order = source.sample(range(size), size)
            left, needed = set(rows), batch_size - len(rows)
            head = [row for row in order if row not in left][:needed]
            chosen = set(head)
            rows += head + [row for row in order if row not in chosen]
        yield [dataset[row] for row in rows[:batch_size]]
        del rows[:batch_size]
