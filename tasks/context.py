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

from pydantic import BaseModel, ConfigDict

from agl_core.config import S3Settings
from agl_core.errors import LedgerError
from agl_core.ledger.run import open_run
from agl_core.ledger.s3_access import S3Access
from agl_core.ledger.stages import IterationLedger
from agl_core.preflight import PreparedRun, prepare_run
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


_context: ContextVar[RunContext | None] = ContextVar("agl_run_context", default=None)


@asynccontextmanager
async def opened(run: PreparedRun) -> AsyncGenerator[None]:
    """Start a run's model server and make its services available to the enclosed flows and tasks.

    Raises:
        UpstreamError: The model server did not start.
    """
    config = run.config
    folder = _STATE_FOLDER / "runs" / config.run_id
    base = run.start_state.policy
    with await asyncio.to_thread(ModelServer.start, config.serving, base, folder) as server:
        token = _context.set(RunContext(run, server))
        try:
            yield
        finally:
            _context.reset(token)
            run.algorithm.close()


@asynccontextmanager
async def opened_for(ref: IterationRef) -> AsyncGenerator[None]:
    """Use the services of the run that is open here; open the iteration's run where none is.

    Raises:
        ConfigError: There is no such run, or it cannot be opened on this machine.
    """
    if _context.get() is not None:
        yield
        return
    credentials = s3_credentials(ref.s3)
    record = open_run(ref.ledger, ref.run_id, S3Access(ref.s3, credentials)).record()
    config = record.config.model_copy(update={"ledger": ref.ledger, "s3": ref.s3})
    async with opened(prepare_run(config, credentials)):
        yield


def current() -> RunContext:
    """Return the services of the run that this code belongs to.

    Raises:
        LedgerError: No run was started in this process.
    """
    context = _context.get()
    if context is None:
        raise LedgerError("no run is open in this process; start the flow training-run")
    return context
