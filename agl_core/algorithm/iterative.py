"""The contract of an algorithm that learns in iterations.

One object serves two drivers: the Prefect flow `training_iteration` over the ledger, and a store
driver without Prefect. Both do the same::

    state = start(...)
    while not done(state):
        proposal = propose(state)          # roll it out
        state = learn(state, experience)   # update, keep a checkpoint
        state = export(state, artifacts)   # the next version
        validation(state)                  # rollouts that score it

`State` is a pydantic model, so a killed run continues from the last one that was committed. An
algorithm may hold live resources (an update worker); it must be able to rebuild them from a state
alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa
from pydantic import BaseModel

from agl_core.algorithm.base import Algorithm
from agl_core.config import AlgorithmSettings, RunConfig
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.training import Artifacts, Dataset, PolicyRef, Proposal

if TYPE_CHECKING:  # loads the proxy and model servers
    from agl_core.algorithm.store_driver import RunResult

StateT = TypeVar("StateT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Experience:
    """What the rollouts of one proposal gave."""

    read_batch: Callable[[], pa.Table]
    """Reads the rows that reach the loss (schema `BATCH_ROWS`, rows with a drop reason left
    out).
    """
    artifacts: Artifacts


class IterativeAlgorithm(Algorithm, ABC, Generic[StateT]):
    """Learns in iterations; see the module's description for the order of calls."""

    state_type: type[StateT]
    """The pydantic model of the state, to read it back from the ledger."""
    server_settings: Collection[str] = ()
    """Keys of the user's settings that are for the launch of vLLM."""
    min_group_size: int | None = None
    """As the user set it."""
    seed: int | None = None
    """What the algorithm's own draws are seeded with; None if it draws nothing by a seed."""
    run_settings: Mapping[str, Any] | RunConfig = MappingProxyType({})
    """Settings of the run that `run` makes or continues."""
    allow_changed: bool = False
    """Whether `run` goes on with a run whose configuration or data changed; manifests will say
    so."""
    result: "RunResult | None" = None
    """Of the last `run`."""

    async def run(
        self,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
    ) -> "RunResult":
        """Train over the algorithm's store, whose runners run the rollouts; see
        `agl_core.algorithm.store_driver.drive`.

        Args:
            train_dataset: Inputs to learn from.
            val_dataset: Inputs to score with.
        """
        from agl_core.algorithm.store_driver import drive  # loads the proxy and model servers

        self.result = await drive(self, train_dataset, val_dataset)
        return self.result

    @property
    def settings(self) -> AlgorithmSettings:
        """The algorithm as a run's configuration names it: by its class and `arguments`."""
        cls = type(self)
        return AlgorithmSettings(
            type=f"{cls.__module__}:{cls.__qualname__}", config=self.arguments()
        )

    def arguments(self) -> dict[str, Any]:
        """Return what makes an equal object, as JSON; to be overridden by a class that takes
        arguments.
        """
        return {}

    @property
    @abstractmethod
    def model_path(self) -> str:
        """Local Hugging Face folder of the policy that training starts from."""

    @property
    @abstractmethod
    def batch_settings(self) -> BatchSettings:
        """How triplets become the rows that `learn` is given."""

    @abstractmethod
    def start(self, base: PolicyRef, train_dataset: Dataset, val_dataset: Dataset | None) -> StateT:
        """Return the state before the first iteration.

        Args:
            base: The policy that training starts from.
            train_dataset: Only its length is kept.
            val_dataset: Only its length is kept; None where nothing is validated.

        Raises:
            ConfigError: The configuration does not fit the datasets.
        """

    @abstractmethod
    def propose(self, state: StateT) -> Proposal:
        """Return the rollouts of the next iteration; the same state gives the same proposal."""

    @abstractmethod
    def validation(self, state: StateT) -> Proposal | None:
        """Return the rollouts that score the state's policy, or None where nothing is validated."""

    @abstractmethod
    async def learn(self, state: StateT, experience: Experience) -> StateT:
        """Update from the experience, keep what a later process needs to go on, and return the next
        state. Called where some row has loss weight.

        Raises:
            TrainerError: The update failed or gave a number that is not finite.
        """

    @abstractmethod
    def skip(self, state: StateT) -> StateT:
        """Return the state after an iteration from which nothing could be learned; `export` then
        leaves the policy as it is.
        """

    @abstractmethod
    async def export(self, state: StateT, artifacts: Artifacts) -> StateT:
        """Write the next policy version and return a state that names it."""

    @abstractmethod
    def done(self, state: StateT) -> bool:
        """Say whether the run has reached its end."""

    @abstractmethod
    def num_iterations(self, state: StateT) -> int:
        """Return the iterations of the whole run, for progress displays."""

    def warm_up(self) -> None:
        """Load what takes long to load; calling it is optional, and useful while something else
        starts.
        """

    def close(self) -> None:
        """Free live resources; the object may be used again afterwards."""
