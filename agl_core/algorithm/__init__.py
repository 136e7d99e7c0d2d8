"""Algorithms: what to roll out next, and how to learn from it."""

from typing import Any

from agl_core.algorithm.iterative import Experience, IterativeAlgorithm
from agl_core.algorithm.verl import check_installed
from agl_core.config import RunConfig
from agl_core.errors import ConfigError

__all__ = ["Experience", "IterativeAlgorithm", "build_algorithm"]


def build_algorithm(config: RunConfig) -> IterativeAlgorithm[Any]:
    """Return the algorithm that a run's configuration names; nothing heavy is loaded yet.

    Raises:
        ConfigError: The algorithm is not installed here, or its settings cannot be used; the
            message names them.
    """
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
    if algorithm.server_settings:
        raise ConfigError(
            f"{', '.join(algorithm.server_settings)}: settings of vLLM's launch; where vLLM shall "
            "serve, give them as arguments in serving.vllm, else leave them out"
        )
    return algorithm
