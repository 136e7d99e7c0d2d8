"""VERL as an iterative algorithm: rollouts of an input as a group, one update an iteration.

Torch and VERL are loaded when an update is first asked for, and their work runs in one thread of
its own, so that the event loop stays free. The update worker lives on between iterations. It is
built again, from the policy and the last checkpoint, where it does not hold the state that it is
asked to go on from: after a crash, a failed update or a replay.
"""

import asyncio
import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict

from agl_core.algorithm.iterative import Experience, IterativeAlgorithm
from agl_core.algorithm.run_settings import check_run_settings
from agl_core.algorithm.verl.config import compose, server_settings, total_steps, uses_reference
from agl_core.algorithm.verl.estimators import OUTCOME
from agl_core.algorithm.verl.order import rows_of_step, validation_rows
from agl_core.algorithm.verl.overrides import Overrides, normalise
from agl_core.algorithm.verl.settings import batch_settings, sampling_fields
from agl_core.config import AlgorithmSettings, RunConfig
from agl_core.errors import ConfigError
from agl_core.trajectory.settings import BatchSettings
from agl_core.trajectory.vocabulary import find_positions
from agl_core.types.training import (
    Artifacts,
    Dataset,
    FolderRef,
    PolicyRef,
    Proposal,
    RolloutRequest,
)

if TYPE_CHECKING:  # loads torch
    from agl_core.algorithm.verl.worker import UpdateWorker

ResultT = TypeVar("ResultT")


class VERLState(BaseModel):
    """Where a run stands; with the configuration, all that a new process needs to go on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Iterations made so far."""
    seed: int
    """Seeds the order of train rows."""
    train_size: int
    """Rows of the train dataset."""
    val_size: int
    """Rows of the validation dataset; 0 where there is none."""
    policy: PolicyRef
    """The newest exported version; one update behind between `learn` and `export`."""
    checkpoint: FolderRef | None
    """Models, optimizers, schedules and RNG after `step` updates; None before the first."""
    reference: PolicyRef | None = None
    """The policy that training started from, where updates compare with it."""
    kl_coefficient: float | None = None
    """Of the next update's penalty on rewards; an adaptive controller moves it. None is the
    configuration's."""
    skipped: bool = False
    """The last iteration updated nothing, so there is nothing to export."""


class VERL(IterativeAlgorithm[VERLState]):
    """Learns by VERL's estimators and losses, in VERL's configuration.

    Args:
        config: Overrides of VERL's `ppo_trainer` configuration: a dict, nested or dotted, a YAML
            file, or `key=value` texts.
        min_group_size: Groups with fewer rollouts are dropped. None takes the fewest that the
            estimator can compare.
        run: Settings of a run that `run` makes in a ledger, or continues: those of a `run.yaml`
            (`RunConfig`) without agent, data and algorithm, such as `run_id`, `ledger` (default
            `.agl/ledger`), `serving`, `rollout.timeout_seconds`, `failures` and `seed`. Without
            `run_id` each `run` is a new one. What only the pipeline honours is refused. A
            `RunConfig` is taken as it is.
        allow_changed: Whether `run` goes on with a run whose configuration or data changed.

    Example:
        `VERL({"data": {"train_batch_size": 16}}, run={"run_id": "mine"})`

    Raises:
        ConfigError: A key is unknown, a setting is not supported, or the estimator compares more
            rollouts than `min_group_size`.
    """

    state_type = VERLState

    def __init__(
        self,
        config: Overrides,
        min_group_size: int | None = None,
        *,
        run: Mapping[str, Any] | RunConfig | None = None,
        allow_changed: bool = False,
    ) -> None:
        if run is not None:
            check_run_settings(run)
            self.run_settings = run
        self.allow_changed = allow_changed
        self.min_group_size = min_group_size
        self.overrides = normalise(config)
        """The user's settings, flat."""
        self.config = compose(self.overrides)
        """VERL's whole configuration with these settings."""
        self.server_settings = server_settings(self.overrides)
        """Those of the user's settings that are for the launch of vLLM."""
        needed = 2 if self.config.algorithm.adv_estimator in OUTCOME else 1
        self.config.data.seed = self.seed = self._settled_seed()
        num_rollouts = self.config.actor_rollout_ref.rollout.n
        if min_group_size is not None and min_group_size > num_rollouts:
            raise ConfigError(
                f"min_group_size is {min_group_size}, above the {num_rollouts} rollouts of a group "
                "(actor_rollout_ref.rollout.n): every group would be dropped"
            )
        if min_group_size is not None and min_group_size < needed:
            raise ConfigError(
                f"min_group_size is {min_group_size}; {self.config.algorithm.adv_estimator} "
                f"compares at least {needed} rollouts of a group"
            )
        self._batch_settings = batch_settings(self.config, min_group_size or needed)
        self._worker: UpdateWorker | None = None
        self._held: tuple[int, FolderRef | None] | None = None
        """Step and checkpoint that the live worker's weights belong to."""

    def _settled_seed(self) -> int:
        """Return the seed of the user's settings, or the default of runs.

        Raises:
            ConfigError: Two are given, and they differ.
        """
        given = self.run_settings
        if isinstance(given, RunConfig):
            of_run: Any = given.seed
        else:
            of_run = given.get("seed")
        of_verl = self.config.data.seed
        if of_run is not None and of_verl is not None and of_run != of_verl:
            raise ConfigError(
                f"data.seed is {of_verl} and the run's seed is {of_run}: set only the run's"
            )
        found = of_verl if of_run is None else of_run
        return RunConfig.model_fields["seed"].default if found is None else found

    @property
    def _penalises(self) -> bool:
        return self.config.algorithm.use_kl_in_reward

    @property
    def model_path(self) -> str:
        """Local Hugging Face folder of the policy that training starts from.

        Raises:
            ConfigError: `actor_rollout_ref.model.path` is not set.
        """
        path = self.overrides.get("actor_rollout_ref.model.path")
        if path is None:
            raise ConfigError("set actor_rollout_ref.model.path to a local Hugging Face folder")
        return str(path)

    @property
    def settings(self) -> AlgorithmSettings:
        """What the user set, for the run's record."""
        return AlgorithmSettings(type="verl", config=self.overrides)

    @property
    def batch_settings(self) -> BatchSettings:
        """What `agentlightning` and VERL's length limits and temperature say."""
        return self._batch_settings

    def num_iterations(self, state: VERLState) -> int:
        """Return the updates of the whole run."""
        return total_steps(self.config, state.train_size)

    def warm_up(self) -> None:
        """Load torch and VERL (about 10 s)."""
        importlib.import_module("agl_core.algorithm.verl.worker")

    def start(
        self, base: PolicyRef, train_dataset: Dataset, val_dataset: Dataset | None
    ) -> VERLState:
        """Return the state before the first iteration.

        Raises:
            ConfigError: The train dataset is smaller than one batch, the run would have no
                iteration, `actor_rollout_ref.model.path` names another folder than `base`, or
                responses may be longer than the policy can hold.
        """
        train_size = len(train_dataset)
        if train_size < self.config.data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size={self.config.data.train_batch_size} is above the "
                f"{train_size} rows of the train dataset"
            )
        path = self.overrides.get("actor_rollout_ref.model.path")
        if path is not None and base.path is not None and not _same_folder(path, base.path):
            raise ConfigError(f"actor_rollout_ref.model.path={path} is not the policy {base.path}")
        if base.path is not None:
            self._check_lengths(Path(base.path).expanduser())
        return VERLState(
            step=0,
            seed=self.config.data.seed,
            train_size=train_size,
            val_size=0 if val_dataset is None else len(val_dataset),
            policy=base,
            checkpoint=None,
            reference=base if uses_reference(self.config) else None,
        )

    def _check_lengths(self, folder: Path) -> None:
        """Return if a response of the permitted length fits into the policy; else every call would
        be refused.
        """
        positions, limit = find_positions(folder), self.config.data.max_response_length
        if positions is not None and limit >= positions:
            raise ConfigError(
                f"data.max_response_length={limit} is max_tokens of each model call, and the "
                f"policy holds {positions} tokens of prompt and response together: every call "
                "would be refused; set a smaller one"
            )

    def propose(self, state: VERLState) -> Proposal:
        """Return `train_batch_size` inputs, each `rollout.n` times; see `order.rows_of_step`."""
        rows = rows_of_step(
            state.step,
            size=state.train_size,
            batch_size=self.config.data.train_batch_size,
            seed=state.seed if self.config.data.shuffle else None,
        )
        return self._proposal(state, "train", rows, self.config.actor_rollout_ref.rollout, True)

    def validation(self, state: VERLState) -> Proposal | None:
        """Return `val_kwargs.n` rollouts of each validation row, or of `data.val_max_samples` rows.

        None after a skipped iteration, which made no version. The base policy is scored where
        `trainer.val_before_train` says so; later ones always, or every `trainer.test_freq`
        iterations and at the end where that is set.
        """
        if not state.val_size or state.skipped or not self._validates(state):
            return None
        rows = validation_rows(
            state.val_size,
            self.config.data.val_max_samples,
            seed=state.seed if self.config.data.shuffle else None,
        )
        settings = self.config.actor_rollout_ref.rollout.val_kwargs
        return self._proposal(state, "val", rows, settings, settings.do_sample)

    async def learn(self, state: VERLState, experience: Experience) -> VERLState:
        """Update the policy, keep a checkpoint and the tables `update_rows` and `update_metrics`.

        Raises:
            TrainerError: The batch cannot be learned from, the update failed, or it gave a number
                that is not finite. The state stays good to try again.
            LedgerError: The checkpoint to go on from is missing or damaged.
        """
        return await self._in_thread(lambda: self._learn(state, experience))

    def skip(self, state: VERLState) -> VERLState:
        """Return the state of the next step with the same weights; schedules wait."""
        if self._held == (state.step, state.checkpoint):
            self._held = (state.step + 1, state.checkpoint)
        return state.model_copy(update={"step": state.step + 1, "skipped": True})

    async def export(self, state: VERLState, artifacts: Artifacts) -> VERLState:
        """Write the weights after `state.step` iterations as the policy version of that number;
        none where the last one was skipped.

        Raises:
            TrainerError: The worker cannot be rebuilt, or the weights cannot be written.
            LedgerError: The checkpoint is missing or damaged.
        """
        if state.skipped:
            return state
        return await self._in_thread(lambda: self._export(state, artifacts))

    def done(self, state: VERLState) -> bool:
        """Say whether the run has made all its updates."""
        return state.step >= total_steps(self.config, state.train_size)

    def close(self) -> None:
        """Free the update worker and its thread; they come back when needed."""
        if "_executor" in self.__dict__:
            self._executor.submit(self._drop_worker).result()
            self._executor.shutdown()
            del self._executor

    def _proposal(
        self,
        state: VERLState,
        mode: Literal["train", "val"],
        rows: list[int],
        sampling: DictConfig,
        is_sampled: bool,
    ) -> Proposal:
        parameters: dict[str, Any] = {
            "temperature": float(sampling.temperature) if is_sampled else 0.0,
            "max_tokens": self.config.data.max_response_length,
        }
        cuts = sampling_fields(sampling) if is_sampled else {}
        if "top_k" in cuts:
            parameters["extra_body"] = {"top_k": cuts.pop("top_k")}  # not a field of OpenAI's
        parameters |= cuts
        return Proposal(
            policy=state.policy,
            sampling_parameters=parameters,
            requests=tuple(
                RolloutRequest(dataset=mode, row=row, group=group, sample=sample, mode=mode)
                for group, row in enumerate(rows)
                for sample in range(sampling.n)
            ),
        )

    def _validates(self, state: VERLState) -> bool:
        if state.step == 0:
            return self.config.trainer.val_before_train
        if "trainer.test_freq" not in self.overrides:
            return True
        every = self.config.trainer.test_freq
        return every > 0 and (state.step % every == 0 or self.done(state))

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="verl")

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _learn(self, state: VERLState, experience: Experience) -> VERLState:
        from agl_core.algorithm.verl.batch import read_rows
        from agl_core.algorithm.verl.metrics import metrics_table
        from agl_core.algorithm.verl.update import learn

        batch = read_rows(experience.read_batch())
        worker = self._worker_at(state, experience.artifacts)
        coefficient = state.kl_coefficient
        if coefficient is None:
            coefficient = float(self.config.algorithm.kl_ctrl.kl_coef)
        self._held = None  # until the new weights are kept
        update = learn(
            worker,
            batch,
            self.config,
            self.batch_settings,
            step=state.step,
            kl_coefficient=coefficient,
        )
        checkpoint = state.checkpoint
        if update.steps:
            folder = experience.artifacts.scratch("checkpoint")
            worker.save_checkpoint(folder, state.step + 1)
            checkpoint = experience.artifacts.put_folder("checkpoint", folder)
        experience.artifacts.put_table("update_rows", update.rows)
        experience.artifacts.put_table(
            "update_metrics", metrics_table(update.steps, update.metrics)
        )
        self._held = (state.step + 1, checkpoint)
        return state.model_copy(
            update={
                "step": state.step + 1,
                "checkpoint": checkpoint,
                "skipped": not update.steps,
                "kl_coefficient": update.kl_coefficient if self._penalises else None,
            }
        )

    def _export(self, state: VERLState, artifacts: Artifacts) -> VERLState:
        from agl_core.serving.weights import weights_digest

        worker = self._worker_at(state, artifacts)
        folder = artifacts.scratch("policy")
        if not worker.model_folder.is_dir():  # fetched for a stage that has ended
            worker.model_folder = _policy_folder(state.policy, artifacts)
        worker.export(folder)
        policy = PolicyRef(
            version=f"v{state.step:06d}",
            weights_digest=weights_digest(folder),
            folder=artifacts.put_folder("policy", folder),
        )
        return state.model_copy(update={"policy": policy})

    def _worker_at(self, state: VERLState, artifacts: Artifacts) -> "UpdateWorker":
        """Return a worker that holds the state's weights, building it if the live one does not."""
        from agl_core.algorithm.verl.worker import UpdateWorker

        if self._worker is None or self._held != (state.step, state.checkpoint):
            self._drop_worker()
            folder = _policy_folder(state.policy, artifacts)
            reference = state.reference and _policy_folder(state.reference, artifacts)
            steps = total_steps(self.config, state.train_size)
            self._worker = UpdateWorker(self.config, folder, steps, reference)
            if state.checkpoint is not None:
                self._worker.load_checkpoint(artifacts.fetch_folder(state.checkpoint))
            self._held = (state.step, state.checkpoint)
        return self._worker

    def _drop_worker(self) -> None:
        self._held = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _policy_folder(policy: PolicyRef, artifacts: Artifacts) -> Path:
    if policy.folder is not None:
        return artifacts.fetch_folder(policy.folder)
    if policy.path is None:
        raise ConfigError(f"policy {policy.version} has neither a path nor a folder")
    return Path(policy.path).expanduser()


def _same_folder(one: str, other: str) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
