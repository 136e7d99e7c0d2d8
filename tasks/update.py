"""Stages `update` and `export`: let the algorithm learn, then write the next version."""

import logging
from collections import defaultdict
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from agl_core import progress
from agl_core.algorithm.iterative import Experience
from agl_core.errors import TrainerError
from agl_core.ledger import files
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.ledger.tables import BATCH_ROWS, UPDATE_METRICS
from agl_core.types.training import FileRef
from tasks import context
from tasks.context import IterationRef
from tasks.policies import ledger_task
from tasks.propose import state_before

logger = logging.getLogger(__name__)


@ledger_task(name="update", task_run_name="update")
async def update(ref: IterationRef) -> StageRecord:
    """Run one update step on the rows that reach the loss, and keep a checkpoint.

    Raises:
        TrainerError: No row reaches the loss and the algorithm does not skip such an iteration, or
            the update failed.
    """
    iteration = ref.open()
    if record := iteration.record("update"):
        return record
    progress.report(progress.StageStarted(ref.iteration, "update"))
    adapted = iteration.finished("adapt")
    algorithm = context.current().run.algorithm
    if not adapted.values["coverage"]["trained"]:
        found = (
            f"iteration {ref.iteration}: no row reaches the loss; rollouts: "
            f"{adapted.values['coverage']}, rows: {adapted.values['rows']}"
        )
        if algorithm.batch_settings.on_empty == "fail":
            raise TrainerError(found)
        logger.warning("%s; the update is skipped", found)
        with iteration.stage("update") as stage:
            state = algorithm.skip(state_before(iteration))
            stage.put_json("state", state.model_dump(mode="json"))
        return iteration.finished("update")

    def read_batch() -> pa.Table:
        rows = files.read_table(iteration.storage, adapted.file("batch").key, BATCH_ROWS)
        return rows.filter(pc.is_null(rows["drop_reason"]))

    with iteration.stage("update") as stage:
        state = await algorithm.learn(state_before(iteration), Experience(read_batch, stage))
        stage.put_json("state", state.model_dump(mode="json"))
        metrics = stage.outputs.get("update_metrics")
        if isinstance(metrics, FileRef):
            stage.values["metrics"] = _mean_metrics(iteration, metrics.key)
    return iteration.finished("update")


@ledger_task(name="export", task_run_name="export")
async def export(ref: IterationRef) -> StageRecord:
    """Write the policy version that the update made, if it made one."""
    iteration = ref.open()
    if record := iteration.record("export"):
        return record
    progress.report(progress.StageStarted(ref.iteration, "export"))
    algorithm = context.current().run.algorithm
    with iteration.stage("export") as stage:
        state = await algorithm.export(read_state(iteration, "update"), stage)
        stage.put_json("state", state.model_dump(mode="json"))
    return iteration.finished("export")


def read_state(iteration: IterationLedger, stage: str) -> Any:
    """Return the algorithm's state as a finished stage left it."""
    key = iteration.finished(stage).file("state").key
    state_type = context.current().run.algorithm.state_type
    return state_type.model_validate_json(iteration.storage.read(key))


def _mean_metrics(iteration: IterationLedger, key: str) -> dict[str, float]:
    """Return each update metric's mean over the optimizer steps."""
    table = files.read_table(iteration.storage, key, UPDATE_METRICS, ["name", "value"])
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in zip(table["name"].to_pylist(), table["value"].to_pylist(), strict=True):
        values[name].append(value)
    return {name: fmean(found) for name, found in sorted(values.items())}
