"""N iterations of one run, continued from where the ledger ends."""

import asyncio
from pathlib import Path

from prefect import flow
from pydantic import BaseModel, ConfigDict

from agl_core import progress
from agl_core.config import RunConfig
from agl_core.preflight import PreparedRun, prepare_run
from agl_core.serving.launch import ModelServer
from flows.training_iteration import training_iteration
from tasks import context
from tasks.context import IterationRef, RunContext
from tasks.plot import plot

_STATE_FOLDER = Path(".agl")


class RunSummary(BaseModel):
    """How a run ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    ledger: str
    iterations: int


@flow(name="training-run", flow_run_name="{config.run_id}", persist_result=False)
async def training_run(config: RunConfig) -> RunSummary:
    """Train until the algorithm is done; committed iterations are found and not repeated.

    Raises:
        ConfigError: The configuration cannot be used, or the run exists with another one.
    """
    run = prepare_run(config)
    committed = run.ledger.committed()
    for number in range(committed):
        progress.report(progress.IterationCommitted(run.ledger.manifest(number)))
    if not run.algorithm.done(run.state_after(committed)):
        folder = _STATE_FOLDER / "runs" / config.run_id
        base = run.start_state.policy
        with await asyncio.to_thread(ModelServer.start, config.serving, base, folder) as server:
            try:
                with context.use(RunContext(run, server)):
                    committed = await _iterate(run, committed)
            finally:
                run.algorithm.close()
    plot(run.ledger)
    return RunSummary(run_id=config.run_id, ledger=run.ledger.storage.uri, iterations=committed)


async def _iterate(run: PreparedRun, committed: int) -> int:
    """Run iterations until the last committed state is the end; return how many are committed."""
    while not run.algorithm.done(run.state_after(committed)):
        ref = IterationRef(
            ledger=run.ledger.storage.uri, run_id=run.ledger.run_id, iteration=committed
        )
        await training_iteration(ref)
        committed += 1
    return committed
