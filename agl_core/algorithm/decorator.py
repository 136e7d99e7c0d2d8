"""Functions as algorithms: a trainer's parts go to the parameters that have their names."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from agl_core.algorithm.base import Algorithm
from agl_core.errors import ConfigError
from agl_core.types.core import Dataset

AlgorithmFunc = Callable[..., Any]
"""A function that `FunctionalAlgorithm` takes."""
_PARTS = ("store", "adapter", "llm_proxy", "initial_resources")
_DATASETS = ("train_dataset", "val_dataset")
_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class FunctionalAlgorithm(Algorithm):
    """A function as an algorithm; still callable as the function it is.

    Args:
        function: Async or not. It takes any of `store`, `adapter`, `llm_proxy`,
            `initial_resources`, `train_dataset` and `val_dataset`.

    Raises:
        ConfigError: It has another parameter without a default.
    """

    def __init__(self, function: AlgorithmFunc) -> None:
        self._function = function
        self._takes = _parameters(function)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it is."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<algorithm {_name(self._function)}>"

    def __reduce__(self) -> Any:
        """Travel by name where it stands in the function's place, else with the function."""
        name = getattr(self._function, "__qualname__", None)
        module = importlib.import_module(self._function.__module__) if name else None
        if name and getattr(module, name, None) is self:
            return name
        return type(self), (self._function,)

    def is_async(self) -> bool:
        """Tell whether `run` is to be awaited."""
        return inspect.iscoroutinefunction(self._function)

    def run(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> Any:
        """Call the function with what it takes; awaitable where the function is async.

        Raises:
            TypeError: A dataset is given that the function does not take.
            ValueError: It takes a store or an adapter, and none is set.
        """
        given: dict[str, Any] = dict(zip(_DATASETS, (train_dataset, val_dataset), strict=True))
        for name, dataset in given.items():
            if dataset is not None and name not in self._takes:
                raise TypeError(
                    f"{name} is provided but not supported by the algorithm function: "
                    f"{_name(self._function)} takes none; give it a "
                    f"parameter of that name"
                )
        parts = {name: getattr(self, f"get_{name}") for name in _PARTS}
        arguments = {
            name: given[name] if name in given else parts[name]()
            for name in (*_PARTS, *_DATASETS)
            if name in self._takes
        }
        return self._function(**arguments)


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make a function an algorithm.

    Raises:
        ConfigError: It has a parameter that nothing is given for.
    """
    return function if isinstance(function, FunctionalAlgorithm) else FunctionalAlgorithm(function)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters that are filled in."""
    parameters = inspect.signature(function).parameters.values()
    known = {
        p.name
        for p in parameters
        if p.name in _PARTS + _DATASETS and p.kind is not _POSITIONAL_ONLY
    }
    for parameter in parameters:
        has_value = parameter.default is not parameter.empty or parameter.kind in _VARIADIC
        if parameter.name not in known and not has_value:
            raise ConfigError(
                f"algorithm {_name(function)}: nothing is known to give for its parameter "
                f"{parameter.name!r}; it may take {', '.join(_PARTS + _DATASETS)}"
            )
    return frozenset(known)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
