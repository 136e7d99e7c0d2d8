"""Algorithms that end soon and learn nothing: to try an agent out before training it."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from agl_core.algorithm.base import Algorithm
from agl_core.algorithm.utils import with_llm_proxy, with_store
from agl_core.algorithm.waiting import Patience, cancel_rollouts
from agl_core.emitter.reward import final_reward
from agl_core.errors import ConfigError, TraceError
from agl_core.runner.failure import describe_exception
from agl_core.store.base import LightningStore
from agl_core.types.core import (
    AttemptedRollout,
    Dataset,
    EnqueueRolloutRequest,
    Rollout,
    RolloutMode,
    Triplet,
)
from agl_core.types.resources import NamedResources
from agl_core.types.tracer import Span

if TYPE_CHECKING:  # only named; it loads a web server
    from agl_core.algorithm.baseline import BaselineIterations
    from agl_core.llm_proxy.proxy import LLMProxy

logger = logging.getLogger(__name__)

SpanVerbosity = Literal["keys", "key_values", "none"]

_DEFAULT_SPLIT = 0.5
_FIRST_PAUSE_SECONDS = 0.05


class FastAlgorithm(Algorithm):
    """An algorithm that is quick enough for `Trainer.dev`."""


@dataclass(slots=True)
class BaselineSummary:
    """What a Baseline saw."""

    ends: Counter[str] = field(default_factory=Counter[str])
    """Rollouts by how they ended: `succeeded`, a kind of failure, or a status of the store."""
    rewards: list[float] = field(default_factory=list[float])
    """Final rewards of the rollouts that have one."""
    num_spans: int = 0
    num_triplets: int = 0
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Why nothing could be read from a rollout, by its id."""

    @property
    def mean_reward(self) -> float | None:
        """Mean over the rollouts that have a reward; None where none has."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def __str__(self) -> str:
        mean = "no reward" if self.mean_reward is None else f"mean reward {self.mean_reward:.4g}"
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common()) or "none"
        return (
            f"rollouts: {ends}; {mean} over {len(self.rewards)}; {self.num_spans} spans, "
            f"{self.num_triplets} triplets; {len(self.problems)} rollouts could not be read"
        )


class Baseline(FastAlgorithm):
    """Runs an agent over the datasets, logs what it left, and learns nothing.

    The queue is kept short, so that runners always have something and a stop loses little. What is
    wrong with one rollout (no spans, an adapter that raises) is reported with its id and ends
    nothing. `summary` has the counts afterwards, by mode.

    Args:
        n_epochs: Passes over the datasets, the train rows first in each.
        train_split: Not used: both datasets are given to `run`. Accepted as 0.5, its default in
            Agent Lightning; another value is refused.
        polling_interval: Longest time in seconds between two looks at the store, while nothing
            happens there.
        max_queue_length: Most rollouts in the queue at once.
        span_verbosity: What is logged of each span: its attributes' names, also their values, or
            nothing.
        stall_seconds: How long none of the rollouts may be taken or end before `run` gives up.

    Raises:
        ConfigError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = _DEFAULT_SPLIT,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: SpanVerbosity = "keys",
        stall_seconds: float = 600.0,
    ) -> None:
        for name, value, is_valid in (
            ("n_epochs", n_epochs, n_epochs >= 1),
            ("polling_interval", polling_interval, polling_interval > 0),
            ("max_queue_length", max_queue_length, max_queue_length >= 1),
            ("span_verbosity", span_verbosity, span_verbosity in get_args(SpanVerbosity)),
            ("stall_seconds", stall_seconds, stall_seconds > 0),
        ):
            if not is_valid:
                raise ConfigError(f"Baseline: {name} cannot be {value!r}")
        if not 0 < train_split < 1:
            raise ConfigError(f"Baseline: train_split must be between 0 and 1; got {train_split!r}")
        if train_split != _DEFAULT_SPLIT:
            raise ConfigError(
                f"Baseline: train_split={train_split!r} would split nothing; give run() a "
                "train_dataset and a val_dataset"
            )
        self._n_epochs = n_epochs
        self._polling_interval = polling_interval
        self._max_queue_length = max_queue_length
        self._span_verbosity = span_verbosity
        self._stall_seconds = stall_seconds
        self.summary: dict[str, BaselineSummary] = {}
        """By mode, `train` and `val`, of the last `run`."""

    def iterations(self, model: str) -> "BaselineIterations":
        """Return what does the same in the pipeline, which serves the policy in a folder."""
        from agl_core.algorithm.baseline import BaselineIterations

        return BaselineIterations(model, n_epochs=self._n_epochs)

    async def run(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Roll out every row of the datasets, `n_epochs` times.

        Raises:
            ConfigError: There is no row.
            TransientError: No runner took a rollout for too long.
        """
        datasets: dict[RolloutMode, Dataset[Any]] = {}
        if train_dataset is not None and len(train_dataset):
            datasets["train"] = train_dataset
        if val_dataset is not None and len(val_dataset):
            datasets["val"] = val_dataset
        if not datasets:
            raise ConfigError("Baseline has nothing to run: give a train_dataset or a val_dataset")
        await self._run(datasets)

    @with_llm_proxy()
    @with_store
    async def _run(
        self,
        store: LightningStore,
        llm_proxy: "LLMProxy | None",
        datasets: Mapping[RolloutMode, Dataset[Any]],
    ) -> None:
        await self._publish(store)
        self.summary = {mode: BaselineSummary() for mode in datasets}
        for epoch in range(self._n_epochs):
            await self._run_epoch(store, llm_proxy, _requests(datasets, epoch))
        for mode, summary in self.summary.items():
            logger.info("Baseline, %s %s", mode, summary)

    async def _publish(self, store: LightningStore) -> None:
        """Publish the initial resources; else none, for agents that need none.

        Raises:
            ConfigError: The agent needs one.
        """
        resources = self.get_initial_resources()
        if resources is None and await store.get_latest_resources() is not None:
            return
        try:
            self._check_agent(resources or {})
        except ConfigError as error:
            raise ConfigError(
                f"{error}: give the trainer initial_resources, for example "
                '{"main_llm": RecordedLLM(endpoint="http://HOST:PORT/v1", model=NAME)}'
            ) from error
        await store.update_resources("default", resources or {})

    def _check_agent(self, resources: NamedResources) -> None:
        """Check the trainer's agent, where there is a trainer."""
        agent = None if self._trainer is None else self.get_trainer().agent
        if agent is not None:
            agent.check_resources(resources)

    async def _run_epoch(
        self,
        store: LightningStore,
        llm_proxy: "LLMProxy | None",
        requests: Iterator[EnqueueRolloutRequest],
    ) -> None:
        """Keep the queue filled, and look at what ends, until all has ended."""
        patience = Patience(store, self._stall_seconds, "Baseline")
        pending: set[str] = set()
        pause, has_more = _FIRST_PAUSE_SECONDS, True
        try:
            while has_more or pending:
                added: Sequence[Rollout] = []
                if has_more:
                    free = self._max_queue_length - await _count_queued(store)
                    batch = list(islice(requests, max(free, 0)))
                    has_more = len(batch) >= free
                    added = await store.enqueue_many_rollouts(batch) if batch else []
                    pending.update(rollout.rollout_id for rollout in added)
                seconds = pause if has_more else self._polling_interval
                ended = await _wait(store, pending, seconds)
                if ended and llm_proxy is not None and llm_proxy.is_running():
                    await llm_proxy.flush()
                for rollout in ended:
                    pending.discard(rollout.rollout_id)
                    await self._harvest(store, rollout)
                if added or ended:
                    pause = _FIRST_PAUSE_SECONDS
                    patience.renew()
                else:
                    pause = min(2 * pause, self._polling_interval)
                    await patience.check(pending)
        finally:
            await cancel_rollouts(store, pending)

    async def _harvest(self, store: LightningStore, rollout: Rollout) -> None:
        """Count and log what a rollout left; what cannot be read is a problem of this one alone."""
        summary = self.summary[rollout.mode or "train"]
        summary.ends[_end_of(rollout)] += 1
        try:
            spans = list(await store.query_spans(rollout.rollout_id, "latest"))
            if not spans:
                raise TraceError("it has no spans")
            summary.num_spans += len(spans)
            self._log_spans(rollout, spans)
            reward = final_reward(None, spans)
            if reward is not None:
                summary.rewards.append(reward)
            logger.info("rollout=%s %s, reward %s", rollout.rollout_id, _end_of(rollout), reward)
            self._log_triplets(rollout, spans, summary)
        except Exception as error:  # noqa: BLE001 - of one rollout; the run goes on
            reason = str(error) if isinstance(error, TraceError) else describe_exception(error)
            summary.problems[rollout.rollout_id] = reason
            logger.warning("rollout=%s could not be read: %s", rollout.rollout_id, reason)

    def _log_triplets(
        self, rollout: Rollout, spans: Sequence[Span], summary: BaselineSummary
    ) -> None:
        """Log what the adapter makes of the spans, if there is one."""
        adapter = self.find_adapter()
        if adapter is None:
            return
        adapted = adapter.adapt(spans)
        if not isinstance(adapted, Sequence):
            logger.info("rollout=%s adapted to %s", rollout.rollout_id, type(adapted).__name__)
            return
        summary.num_triplets += len(adapted)
        rewards = [item.reward for item in adapted if isinstance(item, Triplet)]
        logger.info("rollout=%s %d triplets, rewards %s", rollout.rollout_id, len(adapted), rewards)

    def _log_spans(self, rollout: Rollout, spans: Sequence[Span]) -> None:
        if self._span_verbosity == "none":
            return
        for span in spans:
            is_short = self._span_verbosity == "keys"
            shown = sorted(span.attributes) if is_short else span.attributes
            logger.info(
                "rollout=%s span %d %s: %s", rollout.rollout_id, span.sequence_id, span.name, shown
            )


def _requests(
    datasets: Mapping[RolloutMode, Dataset[Any]], epoch: int
) -> Iterator[EnqueueRolloutRequest]:
    """Yield a request for each row."""
    for mode, rows in datasets.items():
        for row in range(len(rows)):
            metadata = {"epoch": epoch, "row": row}
            yield EnqueueRolloutRequest(input=rows[row], mode=mode, metadata=metadata)


async def _count_queued(store: LightningStore) -> int:
    return (await store.query_rollouts(status_in=["queuing", "requeuing"], limit=0)).total


async def _wait(store: LightningStore, pending: set[str], seconds: float) -> list[Rollout]:
    """Return those that have ended, at once where that are all of them, else after some time."""
    if not pending:
        await asyncio.sleep(seconds)
        return []
    return await store.wait_for_rollouts(rollout_ids=sorted(pending), timeout=seconds)


def _end_of(rollout: Rollout) -> str:
    """Return how a rollout ended: its last attempt's kind of failure, where there is one."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    if attempt is not None and attempt.failure_kind is not None:
        return str(attempt.failure_kind)
    return rollout.status
