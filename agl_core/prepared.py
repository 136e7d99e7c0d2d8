"""A run that may begin: what was checked, and what its identity is in the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agl_core.config import RunConfig
from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.run import RunLedger, RunRecord

if TYPE_CHECKING:  # an iterative algorithm drives itself, by what stands on this module
    from agl_core.algorithm.iterative import IterativeAlgorithm


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run whose configuration was checked and whose identity stands in the ledger."""

    config: RunConfig
    ledger: RunLedger
    record: RunRecord
    """As the ledger has it, but with the code and the packages of this process."""
    algorithm: "IterativeAlgorithm[Any]"
    inputs: dict[str, Sequence[str]]
    """Rows of the datasets as JSON, by `train` and `val`."""
    start_state: Any
    """State before the first iteration."""

    def state_after(self, committed: int) -> Any:
        """Return the algorithm's state after some committed iterations.

        Raises:
            LedgerError: The last manifest has another one than its stage left.
        """
        if committed == 0:
            return self.start_state
        iteration = self.ledger.iteration(committed - 1)
        file = iteration.finished("export").file("state")
        state = self.ledger.manifest(committed - 1).state
        if files.read_json(iteration.storage, file) != state:
            raise LedgerError(
                f"{iteration.manifest_key} has another state than {file.key}, from which it was "
                "made: see what `agl ledger verify` says"
            )
        return self.algorithm.state_type.model_validate(state)
