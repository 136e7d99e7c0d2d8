"""The last stage, `commit`: write the manifest."""

from typing import Any

from agl_core import progress
from agl_core.ledger import commit as ledger_commit
from agl_core.ledger.manifest import Manifest
from agl_core.ledger.stages import IterationLedger
from agl_core.prepared import PreparedRun


def commit(run: PreparedRun, iteration: IterationLedger, prefect: dict[str, Any]) -> None:
    """Write the manifest; an iteration that has one is left as it is.

    Args:
        run: Whose iteration it is.
        iteration: One whose stages have all finished.
        prefect: Ids of the Prefect runs; empty without Prefect.
    """
    if not iteration.storage.exists(iteration.manifest_key):
        progress.report(progress.StageStarted(iteration.iteration, "commit"))
        changed = [item for change in run.ledger.changes() for item in change.differences]
        ledger_commit.commit(iteration, run.record, prefect, changed)


def read_manifest(iteration: IterationLedger) -> Manifest:
    """Return the manifest of a committed iteration."""
    return Manifest.model_validate_json(iteration.storage.read(iteration.manifest_key))
