"""Drives an iterative algorithm over a store, without Prefect.

    start --> propose --> publish --> roll out --> collect --> adapt --> update --> export
                 ^                                                                     |
                 +------------- commit <------------- validation <---------------------+

The stages and their record are the pipeline's (`agl_core.stages`, `agl_core.ledger`): a run that
was killed goes on where its ledger ends, and `agl ledger show` and `verify` read it. What differs
is who runs the rollouts: the runners of the store. This process owns the model server, which the
run's settings name, and the proxy through which agents call it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_core import env_var, progress
from agl_core.algorithm.own_run import prepare
from agl_core.algorithm.store_rollouts import StoreRollouts, cancel_leftovers
from agl_core.ledger.chain import seal
from agl_core.ledger.holding import held
from agl_core.ledger.manifest import Manifest
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger
from agl_core.llm_proxy.backends import Backend
from agl_core.llm_proxy.proxy import LLMProxy
from agl_core.prepared import PreparedRun
from agl_core.runner.failed import check_failures
from agl_core.serving.attached import check_attached
from agl_core.serving.launch import ModelServer
from agl_core.stages.adapt import adapt
from agl_core.stages.collect import collect
from agl_core.stages.commit import commit, report_committed
from agl_core.stages.propose import TRAIN_SET, open_validation, propose, publish, state_before
from agl_core.stages.update import export, read_state, update
from agl_core.store.base import LightningStore
from agl_core.terminal import plain_line
from agl_core.types.core import Dataset
from agl_core.types.resources import NamedResources
from agl_core.types.training import PolicyRef

if TYPE_CHECKING:  # it drives itself by what is here
    from agl_core.algorithm.iterative import IterativeAlgorithm

logger = logging.getLogger(__name__)

_STATE_FOLDER = Path(".agl")
RESOURCE = "main_llm"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run over a store ended."""

    run_id: str
    ledger: str
    manifests: tuple[Manifest, ...]
    """Of all committed iterations: coverage with reasons, rewards, update metrics, files."""


async def drive(
    algorithm: "IterativeAlgorithm[Any]",
    train_dataset: Dataset[Any] | None,
    val_dataset: Dataset[Any] | None,
) -> RunResult:
    """Train until the algorithm is done; committed iterations are found and not repeated.

    Raises:
        ConfigError: A setting, the data or the model cannot be used; the run exists with another
            identity; or a living process carries it on.
        UpstreamError: The model server does not start or answer.
        IterationStopped: More rollouts failed than the run permits.
        TransientError: No runner takes rollouts, or the store is away. The run can go on later.
    """
    algorithm.get_store()  # before anything is written
    run = await asyncio.to_thread(prepare, algorithm, train_dataset, val_dataset)
    ledger = run.ledger
    committed = ledger.committed()
    logger.info(
        "run=%s ledger=%s/%s: %d iterations, %d of them committed before",
        ledger.run_id,
        ledger.storage.uri,
        ledger.prefix,
        algorithm.num_iterations(run.start_state),
        committed,
    )
    for number in range(committed):
        progress.report(progress.IterationCommitted(ledger.manifest(number)))
    if not algorithm.done(run.state_after(committed)):
        async with _opened(run) as driver:
            while not algorithm.done(run.state_after(committed)):
                await driver.iterate(ledger.iteration(committed))
                committed += 1
    seal(ledger)
    return RunResult(ledger.run_id, ledger.storage.uri, tuple(ledger.manifests()))


@asynccontextmanager
async def _opened(run: PreparedRun) -> "AsyncGenerator[_Driver]":
    """Take the run over and start its model server."""
    config, algorithm = run.config, run.algorithm
    store = algorithm.get_store()
    proxy = algorithm.get_llm_proxy() or LLMProxy(store=store)
    if proxy.get_store() is None:
        proxy.set_store(store)
    folder = _STATE_FOLDER / "runs" / config.run_id
    holding = held(run.ledger, max_automatic=config.max_automatic_starts)
    async with holding as lease:
        await cancel_leftovers(store, config.run_id)
        base = run.start_state.policy
        with await asyncio.to_thread(ModelServer.start, config.serving, base, folder) as server:
            if not config.serving.urls:
                await asyncio.to_thread(check_attached, server.url, run.record.base)
            others = algorithm.get_initial_resources() or {}
            again = lease.ended_before == "failed"
            try:
                yield _Driver(run, store, proxy, server, others, runs_failed_again=again)
            finally:
                algorithm.close()


class _Driver:
    """A run with its services."""

    def __init__(
        self,
        run: PreparedRun,
        store: LightningStore,
        proxy: LLMProxy,
        server: ModelServer,
        resources: NamedResources,
        *,
        runs_failed_again: bool,
    ) -> None:
        self._run = run
        self._store = store
        self._proxy = proxy
        self._server = server
        self._resources = resources
        self._runs_failed_again = runs_failed_again

    async def iterate(self, iteration: IterationLedger) -> None:
        """Run one iteration to its manifest; finished stages are not repeated."""
        run = self._run
        proposed = propose(run, iteration)
        policy = PolicyRef.model_validate(proposed.values["policy_in"])
        publish(run, iteration)
        if iteration.iteration == 0:
            state = state_before(run, iteration)
            await self._evaluate(iteration, state, "rollout_base", "evaluate_base")

        await self._roll_out(iteration, "rollout", RolloutSet(iteration, TRAIN_SET), policy)
        collect(run, iteration, TRAIN_SET, policy)
        adapt(run, iteration)
        await update(run, iteration)
        await export(run, iteration)
        state = read_state(run, iteration, "export")
        await self._evaluate(iteration, state, "rollout_new", "evaluate")

        commit(run, iteration, {})
        manifest = report_committed(iteration)
        logger.info("%s", plain_line(manifest))

    async def _evaluate(
        self, iteration: IterationLedger, state: Any, rollout_stage: str, stage: str
    ) -> None:
        """Score a state's policy on the validation set, if there is one."""
        rollouts = open_validation(self._run, iteration, state)
        if rollouts is None:
            return
        policy = rollouts.read_resources().policy
        await self._roll_out(iteration, rollout_stage, rollouts, policy)
        collect(self._run, iteration, rollouts.name, policy, stage)

    async def _roll_out(
        self, iteration: IterationLedger, stage: str, rollouts: RolloutSet, policy: PolicyRef
    ) -> None:
        """Return once each request of the set has an outcome; record that as a stage.

        Raises:
            IterationStopped: More of them failed than the run permits. Nothing is recorded, so the
            next start runs them again.
        """
        if iteration.record(stage):
            return
        progress.report(progress.StageStarted(iteration.iteration, stage))
        with iteration.stage(stage) as attempt:
            pending = rollouts.unfinished(include_failed=self._runs_failed_again)
            if pending:
                await self._run_rollouts(rollouts, pending, policy)
            check_failures(rollouts, self._run.config.failures)
            rollouts.record(attempt)

    async def _run_rollouts(
        self, rollouts: RolloutSet, pending: list[int], policy: PolicyRef
    ) -> None:
        """Serve the policy, and run rollouts with it."""
        await asyncio.to_thread(self._server.serve, policy, self._run.ledger.storage)
        key = env_var.engine_key()
        backends = [Backend(f"{url}/v1", key) for url in self._server.urls]
        sampling = rollouts.read_resources().sampling_parameters
        serving = self._proxy.serving(
            backends, policy, sampling, self._run.config.rollout.timeout_seconds
        )
        async with serving as llm:
            published = await self._store.add_resources({**self._resources, RESOURCE: llm})
            running = StoreRollouts(self._run, rollouts, self._store, self._proxy)
            await running.run(rollouts.claim(pending), published.resources_id)
