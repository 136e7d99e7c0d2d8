"""The algorithm that a run names in its configuration."""

from typing import Any

from agl_core.algorithm.iterative import IterativeAlgorithm
from agl_core.algorithm.verl import check_installed
from agl_core.config import RunConfig
from agl_core.errors import ConfigError


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
    refuse_server_settings(algorithm)
    return algorithm


def refuse_server_settings(algorithm: IterativeAlgorithm[Any]) -> None:
    """Return if none of the user's settings is for the launch of a vLLM.

    Raises:
        ConfigError: Some are; the message names them.
    """
    if algorithm.server_settings:
        raise ConfigError(
            f"{', '.join(algorithm.server_settings)}: settings of vLLM, but the policy is served "
            "by the embedded engine; leave them out"
        )
