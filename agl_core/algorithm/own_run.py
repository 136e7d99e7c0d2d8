"""The run that an algorithm drives itself: its configuration and its datasets, as a ledger has
them.
"""

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agl_core.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agl_core.algorithm.build import build_algorithm, refuse_server_settings
from agl_core.algorithm.run_settings import IN_MEMORY, LEDGER, UNKNOWN_AGENT
from agl_core.config import AlgorithmSettings, RunConfig, check_settings
from agl_core.dataset import rows_of
from agl_core.errors import ConfigError
from agl_core.preflight import prepare_own_run
from agl_core.prepared import PreparedRun
from agl_core.types.core import Dataset

if TYPE_CHECKING:  # it drives itself by what is here
    from agl_core.algorithm.iterative import IterativeAlgorithm


def prepare(
    algorithm: "IterativeAlgorithm[Any]",
    train_dataset: Dataset[Any] | None,
    val_dataset: Dataset[Any] | None,
) -> PreparedRun:
    """Return the algorithm's run with its identity in the ledger, as it was or new.

    Raises:
        ConfigError: There is nothing to train on, a setting or a row cannot be used, or the run
            exists with another identity.
    """
    if train_dataset is None or not len(train_dataset):
        raise ConfigError(f"{type(algorithm).__name__} needs a train_dataset with rows")
    inputs: dict[str, Sequence[str]] = {"train": rows_of("train_dataset", train_dataset)}
    if val_dataset is not None and len(val_dataset):
        inputs["val"] = rows_of("val_dataset", val_dataset)
    refuse_server_settings(algorithm)
    _check_adapter(algorithm)
    config = _config(algorithm, has_val="val" in inputs)
    return prepare_own_run(config, algorithm, inputs, allow_changed=algorithm.allow_changed)


def _config(algorithm: "IterativeAlgorithm[Any]", *, has_val: bool) -> RunConfig:
    """Return the configuration of the run, for its record."""
    settings = algorithm.run_settings
    if isinstance(settings, RunConfig):
        _refuse_another(settings, algorithm)
        if has_val != (settings.val_data is not None):
            given = "rows" if has_val else "no rows"
            raise ConfigError(
                f"val_data of the run's configuration is {settings.val_data}, and val_dataset has "
                f"{given}: give both or neither"
            )
        return settings
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    name = type(algorithm).__name__.lower()
    values: dict[str, Any] = {
        "run_id": f"{name}-{stamp}-{uuid.uuid4().hex[:4]}",
        "ledger": LEDGER,
        "agent": agent_name(algorithm),
        "train_data": IN_MEMORY,
        "val_data": IN_MEMORY if has_val else None,
        "algorithm": algorithm.settings.model_dump(),
        "min_group_size": algorithm.min_group_size,
        **({} if algorithm.seed is None else {"seed": algorithm.seed}),
        **{name: value for name, value in settings.items() if value is not None},
    }
    config = check_settings(RunConfig, values)
    if algorithm.seed is not None and config.seed != algorithm.seed:  # run_settings set afterwards
        raise ConfigError(
            f"seed of the run's settings is {config.seed}, and the algorithm was made with "
            f"{algorithm.seed}: give both the same"
        )
    return config


def _refuse_another(settings: RunConfig, algorithm: "IterativeAlgorithm[Any]") -> None:
    """Return if a run's whole configuration describes the algorithm that will run.

    Raises:
        ConfigError: It describes another one, so that the record would say what was not used.
    """
    described = build_algorithm(settings)
    pairs = {
        "algorithm": (_without_seed(described.settings), _without_seed(algorithm.settings)),
        "min_group_size": (described.min_group_size, algorithm.min_group_size),
        "seed": (described.seed, algorithm.seed),
    }
    for name, (recorded, used) in pairs.items():
        if recorded != used:
            raise ConfigError(
                f"{name} of the run's configuration is {recorded}, and the algorithm was made "
                f"with {used}: give both the same"
            )


def _without_seed(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the settings without VERL's name of the run's seed."""
    config = {key: value for key, value in settings.config.items() if key != "data.seed"}
    return {"type": settings.type, "config": config}


def agent_name(algorithm: "IterativeAlgorithm[Any]") -> str:
    """Return `module:name` of the trainer's agent, for the record; without a trainer, that the
    runners know.
    """
    try:
        agent = algorithm.get_trainer().agent
    except (ValueError, AttributeError):
        return UNKNOWN_AGENT
    return f"{agent.__module__}:{getattr(agent, '__qualname__', type(agent).__qualname__)}"


def _check_adapter(algorithm: "IterativeAlgorithm[Any]") -> None:
    """Return if the adapter that is set asks for what the rows are made from anyway: every call
    that the proxy recorded.
    """
    adapter = algorithm.find_adapter()
    if adapter is None or isinstance(adapter, LlmProxyTraceToTriplet):
        return
    default = TracerTraceToTriplet()
    if type(adapter) is TracerTraceToTriplet and vars(adapter) == vars(default):
        return
    raise ConfigError(
        f"{type(algorithm).__name__} learns from all calls that its proxy recorded, so "
        f"{type(adapter).__name__} with settings of its own would be ignored: leave the adapter "
        "out, or give LlmProxyTraceToTriplet()"
    )
