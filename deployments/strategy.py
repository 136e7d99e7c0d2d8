"""The strategy `prefect`: a trainer's agent and algorithm as a run of the deployed pipeline.

Nothing of it runs in this process: the agent is imported where shards run, the algorithm where the
training run does. What a trainer was given beyond the two is refused, as the pipeline has its own.
"""

import json
import sys
from types import ModuleType
from typing import Any

from agl_core.adapter.triplet import TracerTraceToTriplet
from agl_core.algorithm.base import Algorithm
from agl_core.algorithm.fast import Baseline
from agl_core.algorithm.iterative import IterativeAlgorithm
from agl_core.config import RunConfig, check_settings
from agl_core.dataset import publish_rows
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
from agl_core.types.core import Dataset
from deployments.credentials import find_credentials
from deployments.server import named_server

_WEEK_SECONDS = 7 * 86400.0


class PrefectExecutionStrategy(ExecutionStrategy):
    """Starts the deployment of the flow `training-run` and waits for its end.

    `PREFECT_API_URL` names the server. The agent must be importable where shards run, the algorithm
    (VERL, Baseline, or an `IterativeAlgorithm` of the user's) where the training run does; datasets
    are published in the ledger.

    Args:
        run_id: Name of the run; one that is there goes on where its ledger ends.
        ledger: A local folder that this process and the workers share, or `s3://bucket/prefix`.
        agent: `package.module:name`; None finds the agent by its own module and name.
        model: Folder of the policy that Baseline scores.
        deployment: Of the flow `training-run`.
        startup_timeout_seconds: How long it may wait for a worker.
        timeout_seconds: How long the whole run may take.
        settings: Further settings of a run, as in its file: `rollout`, `failures`, `serving`,
            `seed` and so on.

    Raises:
        ConfigError: A setting is of the trainer's, not of this strategy.
    """

    def __init__(
        self,
        run_id: str,
        ledger: str = ".agl/ledger",
        *,
        agent: str | None = None,
        model: str | None = None,
        deployment: str = "training-run/training-run",
        startup_timeout_seconds: float = 600.0,
        timeout_seconds: float = _WEEK_SECONDS,
        **settings: Any,
    ) -> None:
        if named := sorted({"algorithm", "train_data", "val_data"} & settings.keys()):
            raise ConfigError(f"{', '.join(named)}: given to Trainer and fit, not to the strategy")
        self.deployment = deployment
        self._agent, self._model = agent, model
        self._startup_timeout_seconds = startup_timeout_seconds
        self._timeout_seconds = timeout_seconds
        self._settings = {"run_id": run_id, "ledger": ledger, **settings}

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
        config = self._config(algorithm, runner.agent)
        if named_server() is None:
            raise ConfigError("strategy prefect: set PREFECT_API_URL to the server of the pipeline")
        from flows.deployed_run import run_deployed

        run_to_end(
            lambda: run_deployed(
                config,
                self.deployment,
                startup_timeout_seconds=self._startup_timeout_seconds,
                timeout_seconds=self._timeout_seconds,
            )
        )

    def _config(self, work: AlgorithmWork, agent: LitAgent[Any]) -> RunConfig:
        """Return the run's configuration, its datasets published."""
        if work.train_dataset is None:
            raise ConfigError("strategy prefect: give fit() a train_dataset")
        values = {
            **self._settings,
            "agent": self._agent or find_path(agent),
            "algorithm": self._algorithm_settings(work.algorithm),
            "train_data": "train",
        }
        config = check_settings(RunConfig, values)
        data = {
            name: _publish(config, f"{config.run_id}-{kind}", dataset)
            for name, kind, dataset in (
                ("train_data", "train", work.train_dataset),
                ("val_data", "val", work.val_dataset),
            )
            if dataset is not None
        }
        return config.model_copy(update=data)

    def _algorithm_settings(self, algorithm: Algorithm | None) -> dict[str, Any]:
        from agl_core.algorithm.verl.algorithm import VERL  # hydra takes a moment

        if isinstance(algorithm, Baseline):
            if self._model is None:
                raise ConfigError("strategy prefect: Baseline scores a policy; give its model=...")
            return {"type": "baseline", "config": algorithm.settings(self._model)}
        if self._model is not None:
            raise ConfigError("model is for Baseline; other algorithms name theirs themselves")
        if isinstance(algorithm, VERL):
            return {"type": "verl", "config": algorithm.settings()}
        if isinstance(algorithm, IterativeAlgorithm):
            cls = type(algorithm)
            if cls.__module__ == "__main__" or "." in cls.__qualname__:
                raise ConfigError(
                    f"algorithm {cls.__qualname__} is not importable by a name: move it to the top "
                    "of a module that the training run can import"
                )
            path = f"{cls.__module__}:{cls.__qualname__}"
            return {"type": path, "config": algorithm.settings()}
        name = "no algorithm" if algorithm is None else type(algorithm).__name__
        raise ConfigError(
            f"the pipeline runs VERL, Baseline or an IterativeAlgorithm, not {name}: an algorithm "
            "with only run() needs strategy 'shm' or 'cs'"
        )


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


def _publish(config: RunConfig, name: str, dataset: Dataset[Any]) -> str:
    """Keep a dataset in the run's ledger and return its URI there."""
    access = S3Access(config.s3, find_credentials(config.s3))
    rows: list[str] = []
    for number in range(len(dataset)):
        try:
            rows.append(json.dumps(dataset[number], sort_keys=True))
        except TypeError as error:
            raise ConfigError(f"{name}, row {number} is not JSON: {error}") from error
    if not rows:
        raise ConfigError(f"{name} has no rows")
    return publish_rows(open_storage(config.ledger, access), name, rows)
