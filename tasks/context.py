"""What the tasks of one process share: the prepared run and its live services.

Task arguments are references; live objects (the algorithm with its worker, the model server) are
found here.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from agl_core.errors import LedgerError
from agl_core.ledger.run import open_run
from agl_core.ledger.stages import IterationLedger
from agl_core.preflight import PreparedRun
from agl_core.serving.launch import ModelServer


class IterationRef(BaseModel):
    """Names one iteration of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ledger: str
    run_id: str
    iteration: int

    def open(self) -> IterationLedger:
        """Return the iteration's keys in the ledger."""
        return open_run(self.ledger, self.run_id).iteration(self.iteration)


@dataclass(frozen=True, slots=True)
class RunContext:
    """A prepared run with its model server."""

    run: PreparedRun
    server: ModelServer


_context: ContextVar[RunContext | None] = ContextVar("agl_run_context", default=None)


@contextmanager
def use(context: RunContext) -> Generator[None]:
    """Make a run's services available to the enclosed flows and tasks."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current() -> RunContext:
    """Return the services of the run that this code belongs to.

    Raises:
        LedgerError: No run was started in this process.
    """
    context = _context.get()
    if context is None:
        raise LedgerError("no run is open in this process; start the flow training-run")
    return context
