"""Algorithms: what to roll out next, and how to learn from it.

Import the names of `__all__` from here; each loads on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a program does not use it does not load
    from agl_core.algorithm.base import Algorithm
    from agl_core.algorithm.decorator import FunctionalAlgorithm, algo
    from agl_core.algorithm.fast import Baseline, FastAlgorithm
    from agl_core.algorithm.iterative import Experience, IterativeAlgorithm
    from agl_core.algorithm.verl.algorithm import VERL

__all__ = [
    "VERL",
    "Algorithm",
    "Baseline",
    "Experience",
    "FastAlgorithm",
    "FunctionalAlgorithm",
    "IterativeAlgorithm",
    "algo",
]

_MODULES = {
    "VERL": "verl.algorithm",
    "Algorithm": "base",
    "Baseline": "fast",
    "Experience": "iterative",
    "FastAlgorithm": "fast",
    "FunctionalAlgorithm": "decorator",
    "IterativeAlgorithm": "iterative",
    "algo": "decorator",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"agl_core.algorithm.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
