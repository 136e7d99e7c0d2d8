"""Stage `commit`: write the manifest, last of all, and draw the report from it."""

from typing import Any

from agl_core import progress
from agl_core.ledger import commit as ledger_commit
from agl_core.ledger.manifest import Manifest
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="commit", task_run_name="commit")
def commit(ref: IterationRef, prefect: dict[str, Any]) -> str:
    """Write the manifest and return its key; an iteration that has one is left as it is."""
    iteration = ref.open()
    if not iteration.storage.exists(iteration.manifest_key):
        progress.report(progress.StageStarted(ref.iteration, "commit"))
        run = context.current().run
        changed = [item for change in run.ledger.changes() for item in change.differences]
        ledger_commit.commit(iteration, run.record, prefect, changed)
    return iteration.manifest_key


def read_manifest(ref: IterationRef) -> Manifest:
    """Return the manifest of a committed iteration."""
    iteration = ref.open()
    return Manifest.model_validate_json(iteration.storage.read(iteration.manifest_key))
