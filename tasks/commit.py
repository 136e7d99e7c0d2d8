"""Stage `commit`: write the manifest, last of all."""

from typing import Any

from agl_core.stages import commit as stage
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task


@ledger_task(name="commit", task_run_name="commit")
def commit(ref: IterationRef, prefect: dict[str, Any]) -> str:
    """Write the manifest and return its key; an iteration that has one is left as it is."""
    iteration = ref.open()
    stage.commit(context.current().run, iteration, prefect)
    return iteration.manifest_key
