"""Baseline in iterations: roll out and score, learn nothing.

What an agent and a model do before any training, in the same records as a run that learns.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from agl_core.algorithm.iterative import Experience, IterativeAlgorithm
from agl_core.errors import ConfigError
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.training import Artifacts, Dataset, PolicyRef, Proposal, RolloutRequest

_NO_LIMIT = 1 << 30


class BaselineState(BaseModel):
    """Where a run stands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Iterations made so far."""
    train_size: int
    val_size: int
    """Rows of the datasets; 0 where there is none."""
    policy: PolicyRef


class BaselineIterations(IterativeAlgorithm[BaselineState]):
    """Rolls every train row out, in order, and scores the validation rows once.

    Args:
        model: Local Hugging Face folder of the policy that is served.
        n_epochs: How often each train row is taken.
        batch_size: Train rows of one iteration; None takes all of them.
        n: Rollouts of each row.
        temperature: For sampling.
        max_tokens: Of one response; None leaves it to the model server.

    Raises:
        ConfigError: A value is out of its range.
    """

    state_type = BaselineState

    def __init__(
        self,
        model: str,
        n_epochs: int = 1,
        batch_size: int | None = None,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
    ) -> None:
        counts = {"n_epochs": n_epochs, "batch_size": batch_size, "n": n, "max_tokens": max_tokens}
        if wrong := [f"{k}={v}" for k, v in counts.items() if v is not None and v < 1]:
            raise ConfigError(f"{', '.join(wrong)}: at least 1")
        if temperature < 0:
            raise ConfigError(f"temperature={temperature}: at least 0")
        self._model = model
        self._n_epochs = n_epochs
        self._batch_size = batch_size
        self._n = n
        self._temperature = temperature
        self._max_tokens = max_tokens

    @property
    def model_path(self) -> str:
        """The folder of the policy."""
        return self._model

    @property
    def batch_settings(self) -> BatchSettings:
        """Every row is kept, and masked."""
        return BatchSettings(
            learns=False,
            max_prompt_length=_NO_LIMIT,
            max_response_length=_NO_LIMIT,
            min_group_size=1,
            on_empty="skip",
            temperature=self._temperature,
        )

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "model": self._model,
            "n_epochs": self._n_epochs,
            "batch_size": self._batch_size,
            "n": self._n,
            "temperature": self._temperature,
            "max_tokens": self._max_tokens,
        }

    def start(
        self, base: PolicyRef, train_dataset: Dataset, val_dataset: Dataset | None
    ) -> BaselineState:
        """Return the state before the first iteration.

        Raises:
            ConfigError: The train dataset is empty or smaller than a batch, or `model` names
                another folder than `base`.
        """
        size = len(train_dataset)
        if size < (self._batch_size or 1):
            raise ConfigError(
                f"batch_size={self._batch_size or 1} is above the {size} rows of the train dataset"
            )
        if base.path is not None and Path(base.path) != Path(self._model).expanduser().resolve():
            raise ConfigError(f"model={self._model} is not the policy {base.path}")
        val_size = 0 if val_dataset is None else len(val_dataset)
        return BaselineState(step=0, train_size=size, val_size=val_size, policy=base)

    def propose(self, state: BaselineState) -> Proposal:
        """Return the next rows of the epoch, each `n` times."""
        size = self._batch_size or state.train_size
        first = state.step % self._per_epoch(state) * size
        return self._proposal(state, range(first, min(first + size, state.train_size)), self._n)

    def validation(self, state: BaselineState) -> Proposal | None:
        """Return one rollout of each validation row, once."""
        if state.step or not state.val_size:
            return None
        proposal = self._proposal(state, range(state.val_size), 1)
        requests = (
            r.model_copy(update={"dataset": "val", "mode": "val"}) for r in proposal.requests
        )
        return proposal.model_copy(update={"requests": tuple(requests)})

    async def learn(self, state: BaselineState, experience: Experience) -> BaselineState:
        """Refuse: no row has loss weight.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("Baseline learns nothing")

    def skip(self, state: BaselineState) -> BaselineState:
        """Return the state after an iteration; every one is such."""
        return state.model_copy(update={"step": state.step + 1})

    async def export(self, state: BaselineState, artifacts: Artifacts) -> BaselineState:
        """Return the state as it is: there is no next version."""
        return state

    def done(self, state: BaselineState) -> bool:
        """Say whether every row was taken in each epoch."""
        return state.step >= self.num_iterations(state)

    def num_iterations(self, state: BaselineState) -> int:
        """Return the batches of all epochs."""
        return self._n_epochs * self._per_epoch(state)

    def _per_epoch(self, state: BaselineState) -> int:
        return -(-state.train_size // (self._batch_size or state.train_size))

    def _proposal(self, state: BaselineState, rows: range, n: int) -> Proposal:
        sampling: dict[str, Any] = {"temperature": self._temperature}
        if self._max_tokens is not None:
            sampling["max_tokens"] = self._max_tokens
        return Proposal(
            policy=state.policy,
            sampling_parameters=sampling,
            requests=tuple(
                RolloutRequest(dataset="train", row=row, group=group, sample=sample, mode="train")
                for group, row in enumerate(rows)
                for sample in range(n)
            ),
        )
