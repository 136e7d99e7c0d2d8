"""What the tasks of one process share: the prepared run and its live services.

Task arguments are references; live objects (the algorithm with its worker, the model server) are
found here.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict

from agl_core.config import RunConfig, S3Settings
from agl_core.errors import ConfigError, LedgerError, NothingToRetryError
from agl_core.ledger.holding import held
from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.s3_access import S3Access
from agl_core.ledger.stages import IterationLedger
from agl_core.preflight import prepare_run
from agl_core.prepared import PreparedRun
from agl_core.serving.launch import ModelServer
from tasks.credentials import s3_credentials

_STATE_FOLDER = Path(".agl")


class IterationRef(BaseModel):
    """Names one iteration of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ledger: str
    s3: S3Settings = S3Settings()
    run_id: str
    iteration: int

    def open(self) -> IterationLedger:
        """Return the iteration's keys in the ledger, through the run that is open here.

        Raises:
            LedgerError: Another run is open in this process, or none.
        """
        ledger = current().run.ledger
        if ledger.run_id != self.run_id:
            raise LedgerError(f"run {ledger.run_id} is open in this process, not {self.run_id}")
        return ledger.iteration(self.iteration)


@dataclass(frozen=True, slots=True)
class RunContext:
    """A prepared run with its model server."""

    run: PreparedRun
    server: ModelServer
    runs_failed_again: bool
    """Whether failed rollouts of stages without a record run again, not only unfinished ones."""


_context: ContextVar[RunContext | None] = ContextVar("agl_run_context", default=None)
_prepared: ContextVar[PreparedRun | None] = ContextVar("agl_prepared_run", default=None)


def hand_over(run: PreparedRun) -> None:
    """Let the next `training_run` of this process use what was prepared for it already."""
    _prepared.set(run)


def handed_over(config: RunConfig) -> PreparedRun | None:
    """Return what was prepared for this configuration; None where nothing was."""
    run = _prepared.get()
    return run if run is not None and run.config == config else None


@asynccontextmanager
async def opened(
    run: PreparedRun, *, automatic: bool = False, is_retry: bool = False
) -> AsyncGenerator[None]:
    """Take the run over, start its model server and make its services available to the enclosed
    flows and tasks.

    Args:
        run: What to carry on.
        automatic: An automation started it.
        is_retry: Run failed rollouts again, as after a start that failed.

    Raises:
        ConfigError: A living process carries the run on, or automations started it too often.
        LeaseLostError: Another process took it over meanwhile.
        UpstreamError: The model server did not start.
    """
    config = run.config
    folder = _STATE_FOLDER / "runs" / config.run_id
    base = run.start_state.policy
    holding = held(
        run.ledger,
        max_automatic=config.max_automatic_starts,
        automatic=automatic,
        flow_run_id=flow_run.id,
        flow_run_name=flow_run.name,
        cancellations=(TerminationSignal,),
    )
    async with holding as lease:
        with await asyncio.to_thread(ModelServer.start, config.serving, base, folder) as server:
            token = _context.set(
                RunContext(run, server, is_retry or lease.ended_before == "failed")
            )
            try:
                yield
            finally:
                _context.reset(token)
                run.algorithm.close()


@asynccontextmanager
async def opened_for(ref: IterationRef) -> AsyncGenerator[None]:
    """Use the services of the run that is open here; open the iteration's run where none is.

    Raises:
        ConfigError: There is no such run, it cannot be opened on this machine, or the iteration is
            not the next one to be committed.
    """
    if _context.get() is not None:
        yield
        return
    credentials = s3_credentials(ref.s3)
    ledger = open_run(ref.ledger, ref.run_id, S3Access(ref.s3, credentials))
    config = ledger.record().config.model_copy(update={"ledger": ref.ledger, "s3": ref.s3})
    _check_open(ledger, ref.iteration)
    async with opened(prepare_run(config, credentials), is_retry=True):
        yield


def _check_open(ledger: RunLedger, iteration: int) -> None:
    """Refuse to run an iteration that is committed, or whose turn has not come.

    Raises:
        ConfigError: It is not the next one; the message says what can be done instead.
    """
    committed = ledger.committed()
    if iteration < committed:
        raise NothingToRetryError(
            f"iteration {iteration} of run {ledger.run_id!r} is committed and cannot be retried: "
            f"look at it with `agl ledger show {ledger.run_id}`, or start another run under "
            "another run id"
        )
    if iteration > committed:
        raise ConfigError(
            f"iteration {iteration} of run {ledger.run_id!r} cannot run yet: iteration "
            f"{committed} is not committed"
        )


def current() -> RunContext:
    """Return the services of the run that this code belongs to.

    Raises:
        LedgerError: No run was started in this process.
    """
    context = _context.get()
    if context is None:
        raise LedgerError("no run is open in this process; start the flow training-run")
    return context
