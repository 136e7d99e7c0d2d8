"""The run that an algorithm drives itself: its configuration and its datasets, as a ledger has
them.
"""

import sys
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
from agl_core.identity import source_file
from agl_core.litagent.decorator import FunctionalLitAgent
from agl_core.litagent.litagent import LitAgent
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
    agent = _find_agent(algorithm)
    if agent is not None and not names_agent(settings.agent, agent):
        raise ConfigError(
            f"agent of the run's configuration is {settings.agent}, and the trainer's is "
            f"{_path_of(agent)}: give both the same"
        )


def _without_seed(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the settings without VERL's name of the run's seed."""
    config = {key: value for key, value in settings.config.items() if key != "data.seed"}
    return {"type": settings.type, "config": config}


def agent_name(algorithm: "IterativeAlgorithm[Any]") -> str:
    """Return `module:name` of the trainer's agent, for the record; without a trainer, that the
    runners know.
    """
    agent = _find_agent(algorithm)
    return UNKNOWN_AGENT if agent is None else _path_of(agent)


def _find_agent(algorithm: "IterativeAlgorithm[Any]") -> Any:
    """Return the trainer's agent; None without one."""
    try:
        return algorithm.get_trainer().agent
    except (ValueError, AttributeError):
        return None


def _path_of(agent: Any) -> str:
    return f"{agent.__module__}:{getattr(agent, '__qualname__', type(agent).__qualname__)}"


def names_agent(path: str, agent: Any) -> bool:
    """Say whether a path names an agent: in a module that is loaded, or in the script that runs,
    which is called `__main__`.
    """
    module_name, _, attribute = path.partition(":")
    file = source_file(module_name)
    modules = [sys.modules.get(module_name)]
    if file is not None and source_file("__main__") == file:
        modules.append(sys.modules["__main__"])
    named = [getattr(module, attribute) for module in modules if hasattr(module, attribute)]
    return any(_code_of(one) is _code_of(agent) for one in named)


def _code_of(agent: Any) -> Any:
    """Return an agent's function or class; the object itself may have been copied to a process."""
    if isinstance(agent, FunctionalLitAgent):
        return agent.function
    return type(agent) if isinstance(agent, LitAgent) else agent


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
