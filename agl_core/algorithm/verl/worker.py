"""The models of an update in this process: the policy, and the critic and the frozen reference
policy where the configuration needs them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from agl_core.algorithm.verl.batch import RowBatch
from agl_core.algorithm.verl.build import build_actor, build_critic, build_reference
from agl_core.algorithm.verl.config import uses_critic, uses_reference
from agl_core.algorithm.verl.export import write_policy
from agl_core.algorithm.verl.model import Model, mini_batches
from agl_core.errors import TrainerError

_CRITIC_FOLDER = "critic"


@dataclass(frozen=True, slots=True)
class LogProbs:
    """What the current weights say about the response tokens of a batch."""

    values: np.ndarray
    """[R] float32 log-probs in nats, in the order of the rows."""
    entropy: float | None
    """Mean over the tokens with loss weight, in nats; None where nothing was computed."""


class UpdateWorker:
    """Drives VERL's `TrainingWorker` of each model on one rank."""

    def __init__(
        self,
        config: DictConfig,
        model_folder: Path,
        total_steps: int,
        reference_folder: Path | None = None,
    ) -> None:
        """Build models, optimizers and schedules.

        Args:
            config: Composed configuration; not changed.
            model_folder: Hugging Face folder with safetensors; `export` reads its layout again. The
                critic starts from it too, where `critic.model.path` names no other.
            total_steps: Iterations of the run, for the learning-rate schedules.
            reference_folder: The frozen policy's; None takes `model_folder`.

        Raises:
            TrainerError: VERL cannot build a model, or this process has a torch process group
                already.
        """
        self._config = config
        self.model_folder = model_folder
        """Its layout is read again by `export`; another folder of the same may take its place."""
        self._models: list[Model] = []
        self._critic = self._reference = None
        try:
            self._actor = self._add(Model(build_actor(config, model_folder, total_steps), "actor/"))
            if uses_critic(config):
                folder = Path(config.critic.model.path or model_folder).expanduser()
                worker = build_critic(config, folder, total_steps, config.data.seed or 0)
                self._critic = self._add(Model(worker, "critic/"))
            if uses_reference(config):
                worker = build_reference(config, reference_folder or model_folder)
                self._reference = self._add(Model(worker))
        except BaseException:
            self.close()
            raise

    def _add(self, model: Model) -> Model:
        self._models.append(model)
        return model

    def close(self) -> None:
        """Free the models and leave the process group; the object cannot be used afterwards."""
        while self._models:
            self._models.pop().close()

    @property
    def has_critic(self) -> bool:
        """Whether `values` and `update_critic` may be called."""
        return self._critic is not None

    @property
    def has_reference(self) -> bool:
        """Whether `reference_log_probs` may be called."""
        return self._reference is not None

    def log_probs(self, batch: RowBatch, temperature: float) -> LogProbs:
        """Return the log-prob of each response token under the current weights.

        Args:
            batch: The rows.
            temperature: Logits are divided by it, as they were in sampling.

        Raises:
            TrainerError: VERL failed, or a log-prob is not finite.
        """
        found = self._actor.infer(
            batch,
            ("log_probs", "entropy"),
            self._config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
            temperature=temperature,
            calculate_entropy=True,
        )
        weight = batch.response_mask
        mean_entropy = float((found["entropy"] * weight).sum() / max(1, weight.sum()))
        return LogProbs(found["log_probs"], mean_entropy)

    def reference_log_probs(self, batch: RowBatch, temperature: float) -> np.ndarray:
        """Return [R] the log-prob of each response token under the frozen policy.

        Raises:
            TrainerError: As `log_probs`.
        """
        assert self._reference is not None
        found = self._reference.infer(
            batch,
            ("log_probs",),
            self._config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
            temperature=temperature,
            calculate_entropy=False,
        )
        return found["log_probs"]

    def values(self, batch: RowBatch) -> np.ndarray:
        """Return [R] the critic's value of each response token, before it is sampled.

        Raises:
            TrainerError: As `log_probs`.
        """
        assert self._critic is not None
        critic = self._config.critic
        micro_batch_size = critic.forward_micro_batch_size_per_gpu
        return self._critic.infer(batch, ("values",), micro_batch_size, temperature=1.0)["values"]

    def update(
        self,
        batch: RowBatch,
        old_log_probs: np.ndarray,
        advantages: np.ndarray,
        *,
        step: int,
        more: Mapping[str, np.ndarray] | None = None,
    ) -> list[dict[str, float]]:
        """Take the optimizer steps of one iteration by VERL's `ppo_loss`, then one step of the
        schedule.

        Rows without a token of loss weight add exactly nothing and are left out, so that no
        mini-batch is empty.

        Args:
            batch: The rows.
            old_log_probs: [R] float32, nats.
            advantages: [R] float32.
            step: Number of the iteration; seeds the order of rows together with
                `actor.data_loader_seed`.
            more: More columns that the loss reads, each [R] float32: `ref_log_prob`,
                `rollout_is_weights`.

        Returns:
            VERL's metrics of each optimizer step, in order; nothing about time or memory.

        Raises:
            TrainerError: VERL failed, no token has loss weight, or a loss or gradient is not
                finite. The weights may have changed: load a checkpoint before going on.
        """
        actor = self._config.actor_rollout_ref.actor
        slices = self._slices(batch, actor, step)
        micro_batch_size = actor.ppo_micro_batch_size_per_gpu
        if actor.policy_loss.loss_mode == "geo_mean" and len(slices[0]) > micro_batch_size:
            raise TrainerError(
                f"geo_mean: a mini-batch has {len(slices[0])} rows and must go through in one "
                f"forward pass, but ppo_micro_batch_size_per_gpu is {micro_batch_size}"
            )
        return self._actor.train(
            batch,
            {"old_log_probs": old_log_probs, "advantages": advantages, **(more or {})},
            slices,
            micro_batch_size,
            temperature=self._config.actor_rollout_ref.rollout.temperature,
            calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
        )

    def update_critic(
        self, batch: RowBatch, values: np.ndarray, returns: np.ndarray, *, step: int
    ) -> list[dict[str, float]]:
        """Take the critic's optimizer steps of one iteration by VERL's `value_loss`.

        Args:
            batch: The rows.
            values: [R] float32, as `values` returned them.
            returns: [R] float32, what the values should be.
            step: As for `update`.

        Returns:
            As `update`.

        Raises:
            TrainerError: As `update`.
        """
        assert self._critic is not None
        critic = self._config.critic
        return self._critic.train(
            batch,
            {"values": values, "returns": returns},
            self._slices(batch, critic, step),
            critic.ppo_micro_batch_size_per_gpu,
            temperature=1.0,
        )

    def _slices(self, batch: RowBatch, settings: DictConfig, step: int) -> list[np.ndarray]:
        """Return the row positions of each mini-batch of all epochs."""
        rows = np.flatnonzero(batch.weighted_tokens() > 0)
        if len(rows) == 0:
            raise TrainerError("no token of the batch has loss weight")
        num_steps = max(1, round(self._config.data.train_batch_size / settings.ppo_mini_batch_size))
        return [
            mini_batch
            for epoch in range(settings.ppo_epochs)
            for mini_batch in mini_batches(
                rows,
                num_steps,
                (settings.data_loader_seed, step, epoch) if settings.shuffle else None,
            )
        ]

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Write models, optimizers, schedules and RNG states in VERL's format; the critic's below
        `critic/`.

        Raises:
            TrainerError: VERL failed.
        """
        self._actor.save_checkpoint(folder, step)
        if self._critic is not None:
            self._critic.save_checkpoint(folder / _CRITIC_FOLDER, step)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote; the next steps are as if nothing had happened
        between.

        Raises:
            TrainerError: The checkpoint was written by another number of ranks or without the
                critic, or VERL failed.
        """
        if self._critic is not None:
            self._critic.load_checkpoint(folder / _CRITIC_FOLDER)
        self._actor.load_checkpoint(folder)

    def export(self, folder: Path) -> None:
        """Write the current weights as an ordinary Hugging Face folder.

        It mirrors the folder that the worker was built from; see `export.write_policy`.

        Args:
            folder: An existing empty folder.

        Raises:
            TrainerError: The model folder has no safetensors, or a tensor that the model lacks.
        """
        write_policy(self._actor.weights(), self.model_folder, folder)
