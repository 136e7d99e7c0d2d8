"""The algorithm that a run names in its configuration."""

import importlib
import inspect
from typing import Any

from agl_core.algorithm.iterative import IterativeAlgorithm
from agl_core.algorithm.verl import check_installed
from agl_core.config import RunConfig
from agl_core.errors import ConfigError


def build_algorithm(config: RunConfig) -> IterativeAlgorithm[Any]:
    """Return the algorithm that a run's configuration names; nothing heavy is loaded yet.

    Raises:
        ConfigError: The algorithm is not there or not one that learns in iterations, or its
            settings cannot be used; the message names them.
    """
    kind = config.algorithm.type
    if kind == "verl":
        return _build_verl(config)
    if kind == "baseline":
        from agl_core.algorithm.baseline import BaselineIterations

        algorithm = _construct(kind, BaselineIterations, config.algorithm.config)
    else:
        algorithm = _construct(kind, _load(kind), config.algorithm.config)
    if config.min_group_size is not None:
        raise ConfigError(f"min_group_size is {config.min_group_size}, and only verl takes one")
    return algorithm


def _build_verl(config: RunConfig) -> IterativeAlgorithm[Any]:
    check_installed()
    from agl_core.algorithm.verl.algorithm import VERL
    from agl_core.algorithm.verl.overrides import normalise

    overrides = normalise(config.algorithm.config)
    if overrides.setdefault("data.seed", config.seed) != config.seed:
        raise ConfigError(
            f"data.seed is {overrides['data.seed']} and the run's seed is {config.seed}: "
            "set only the run's"
        )
    algorithm = VERL(overrides, config.min_group_size)
    refuse_server_settings(algorithm)
    return algorithm


def refuse_server_settings(algorithm: IterativeAlgorithm[Any]) -> None:
    """Return if none of the user's settings is for the launch of a vLLM.

    Raises:
        ConfigError: Some are; the message names them.
    """
    if algorithm.server_settings:
        raise ConfigError(
            f"{', '.join(algorithm.server_settings)}: settings of vLLM's launch; where vLLM shall "
            "serve, give them as arguments in serving.vllm, else leave them out"
        )


def _load(path: str) -> type[IterativeAlgorithm[Any]]:
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"algorithm {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, IterativeAlgorithm)):
        raise ConfigError(
            f"algorithm {path!r} is no subclass of agl_core.IterativeAlgorithm; one that only has "
            "run() is for Trainer.fit"
        )
    return found


def _construct(
    kind: str, cls: type[IterativeAlgorithm[Any]], values: dict[str, Any]
) -> IterativeAlgorithm[Any]:
    try:
        inspect.signature(cls).bind(**values)
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm.config of {kind}: {error}") from error
