"""The strategy `prefect`: a trainer's agent and algorithm as a run of the deployed pipeline.

Nothing of it runs in this process: the agent is imported where shards run, the algorithm where the
training run does. What a trainer was given beyond the two is refused, as the pipeline has its own.
"""

import sys
from types import ModuleType
from typing import Any

from agl_core.adapter.triplet import TracerTraceToTriplet
from agl_core.algorithm.base import Algorithm
from agl_core.algorithm.build import build_algorithm
from agl_core.algorithm.fast import Baseline
from agl_core.algorithm.iterative import IterativeAlgorithm
from agl_core.config import RunConfig, check_settings
from agl_core.dataset import publish_rows, rows_of
from agl_core.errors import ConfigError
from agl_core.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from agl_core.execution.loops import run_to_end
from agl_core.ledger.s3_access import S3Access
from agl_core.ledger.storage import open_storage
from agl_core.litagent.decorator import FunctionalLitAgent
from agl_core.litagent.litagent import LitAgent
from agl_core.store.base import LightningStore
from agl_core.store.memory import InMemoryLightningStore
from agl_core.trainer.bundles import AlgorithmWork, RunnerWork
from deployments.credentials import find_credentials
from deployments.server import named_server

_WEEK_SECONDS = 7 * 86400.0
_LEDGER = ".agl/ledger"
_GIVEN = frozenset({"agent", "algorithm", "min_group_size", "train_data", "val_data"})
"""Of a run's settings, what the trainer and `fit` say."""


class PrefectExecutionStrategy(ExecutionStrategy):
    """Starts the deployment of the flow `training-run` and waits for its end.

    `PREFECT_API_URL` names the server. The agent must be importable where shards run, the algorithm
    (VERL, Baseline, or an `IterativeAlgorithm` of the user's) where the training run does; datasets
    are published in the ledger.

    Args:
        agent: `package.module:name`; None finds the agent by its own module and name.
        model: Folder of the policy that Baseline scores.
        deployment: Of the flow `training-run`.
        startup_timeout_seconds: How long it may wait for a worker.
        timeout_seconds: How long the whole run may take.
        settings: Of the run, as in its file: `run_id`, `ledger` (a local folder that this process
            and the workers share, or `s3://bucket/prefix`), `rollout`, `serving`, `seed` and so on.
            Those that an algorithm was given (`run={...}`) count too.

    Raises:
        ConfigError: A setting is of the trainer's, not of this strategy.
    """

    def __init__(
        self,
        *,
        agent: str | None = None,
        model: str | None = None,
        deployment: str = "training-run/training-run",
        startup_timeout_seconds: float = 600.0,
        timeout_seconds: float = _WEEK_SECONDS,
        **settings: Any,
    ) -> None:
        if named := sorted(_GIVEN & settings.keys()):
            raise ConfigError(f"{', '.join(named)}: given to Trainer and fit, not to the strategy")
        self.deployment = deployment
        self._agent, self._model = agent, model
        self._startup_timeout_seconds = startup_timeout_seconds
        self._timeout_seconds = timeout_seconds
        self._settings = settings

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Start the run and return when it has completed.

        Raises:
            ConfigError: The pipeline cannot run this, or nothing would start it; nothing was.
            ExecutionError: The run did not complete, or not in time.
            KeyboardInterrupt: Ctrl-C; the run was cancelled.
        """
        if not isinstance(algorithm, AlgorithmWork) or not isinstance(runner, RunnerWork):
            raise ConfigError("strategy prefect takes its work from a Trainer")
        _refuse_others(algorithm, runner, store)
        learns = self._iterative(algorithm.algorithm)
        config = self._config(learns, algorithm, runner.agent)
        if named_server() is None:
            raise ConfigError("strategy prefect: set PREFECT_API_URL to the server of the pipeline")
        config = _with_data(config, algorithm)
        from flows.deployed_run import run_deployed

        run_to_end(
            lambda: run_deployed(
                config,
                self.deployment,
                allow_changed=learns.allow_changed,
                startup_timeout_seconds=self._startup_timeout_seconds,
                timeout_seconds=self._timeout_seconds,
            )
        )

    def _config(
        self, algorithm: IterativeAlgorithm[Any], work: AlgorithmWork, agent: LitAgent[Any]
    ) -> RunConfig:
        """Return the run's configuration but for its data."""
        if work.train_dataset is None or not len(work.train_dataset):
            raise ConfigError("strategy prefect: give fit() a train_dataset with rows")
        values = {
            **self._settings_with(algorithm),
            "agent": self._agent or find_path(agent),
            "algorithm": algorithm.settings.model_dump(),
            "min_group_size": algorithm.min_group_size,
            "train_data": "to be published",
        }
        config = check_settings(RunConfig, values)
        build_algorithm(config)  # whether its arguments make one
        return config

    def _iterative(self, algorithm: Algorithm | None) -> IterativeAlgorithm[Any]:
        """Return the algorithm that the pipeline is to run.

        Raises:
            ConfigError: It can run none such.
        """
        if isinstance(algorithm, Baseline):
            if self._model is None:
                raise ConfigError("strategy prefect: Baseline scores a policy; give its model=...")
            return algorithm.iterations(self._model)
        if self._model is not None:
            raise ConfigError("model is for Baseline; other algorithms name theirs themselves")
        cls = type(algorithm)
        if not isinstance(algorithm, IterativeAlgorithm):
            name = "no algorithm" if algorithm is None else cls.__name__
            raise ConfigError(
                f"the pipeline runs VERL, Baseline or an IterativeAlgorithm, not {name}: an "
                "algorithm with only run() needs strategy 'shm' or 'cs'"
            )
        if cls.__module__ == "__main__" or "." in cls.__qualname__:
            raise ConfigError(
                f"algorithm {cls.__qualname__} is not importable by a name: move it to the top of "
                "a module that the training run can import"
            )
        return algorithm

    def _settings_with(self, algorithm: IterativeAlgorithm[Any]) -> dict[str, Any]:
        """Return the run's settings: the strategy's, and those that the algorithm was given."""
        given = algorithm.run_settings
        if isinstance(given, RunConfig):
            given = given.model_dump(exclude_unset=True)
            given = {name: value for name, value in given.items() if name not in _GIVEN}
        if both := sorted(given.keys() & self._settings.keys()):
            raise ConfigError(f"{', '.join(both)}: given to the algorithm and to the strategy")
        settings = {"ledger": _LEDGER, **given, **self._settings}
        if algorithm.seed is not None:
            settings.setdefault("seed", algorithm.seed)
        if "run_id" not in settings:
            raise ConfigError("strategy prefect: give the run a run_id, here or in run={...}")
        return settings


def find_path(agent: LitAgent[Any]) -> str:
    """Return the path by which another process imports an agent.

    Raises:
        ConfigError: It has none.
    """
    function = agent.function if isinstance(agent, FunctionalLitAgent) else None
    name = (function or type(agent)).__module__
    module: ModuleType | None = sys.modules.get(name)
    names = [
        key
        for key, value in vars(module or object).items()
        if value is agent or (function is not None and value is function)
    ]
    if name == "__main__" or not names:
        raise ConfigError(
            f"agent {agent.name} cannot be imported by name where shards run: make it a variable "
            "of a module that they have, or give the strategy agent='package.module:name'"
        )
    return f"{name}:{names[0]}"


def _refuse_others(algorithm: AlgorithmWork, runner: RunnerWork, store: LightningStore) -> None:
    """Refuse what the pipeline would ignore.

    Raises:
        ConfigError: Such a thing was given; the message names it.
    """
    given = {
        "adapter": type(algorithm.adapter) is not TracerTraceToTriplet,
        "initial_resources": algorithm.initial_resources is not None,
        "llm_proxy": algorithm.llm_proxy is not None,
        "runner": runner.runner is not None,
        "tracer": runner.tracer is not None,
        "hooks": bool(runner.hooks),
        "max_rollouts": runner.max_rollouts is not None,
        "store": type(store) is not InMemoryLightningStore,
    }
    if named := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"strategy prefect: {', '.join(named)} of the Trainer would have no effect; the "
            "pipeline has its own"
        )


def _with_data(config: RunConfig, work: AlgorithmWork) -> RunConfig:
    """Return the configuration with its datasets, published in its ledger."""
    storage = open_storage(config.ledger, S3Access(config.s3, find_credentials(config.s3)))
    found = {"train": work.train_dataset, "val": work.val_dataset}
    rows = {kind: rows_of(f"{kind}_dataset", data) for kind, data in found.items() if data}
    data = {
        f"{kind}_data": publish_rows(storage, f"{config.run_id}-{kind}", texts)
        for kind, texts in rows.items()
    }
    return config.model_copy(update=data)
