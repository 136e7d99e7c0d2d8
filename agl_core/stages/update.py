"""Stages `update` and `export`: let the algorithm learn, then write the next version."""

import logging
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from agl_core import progress
from agl_core.algorithm.iterative import Experience
from agl_core.errors import TrainerError
from agl_core.ledger import files
from agl_core.ledger.recount import mean_metrics
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.ledger.tables import BATCH_ROWS
from agl_core.prepared import PreparedRun
from agl_core.stages.propose import state_before
from agl_core.types.training import FileRef

logger = logging.getLogger(__name__)


async def update(run: PreparedRun, iteration: IterationLedger) -> StageRecord:
    """Run one update step on the rows that reach the loss, and keep a checkpoint.

    Raises:
        TrainerError: No row reaches the loss and the algorithm does not skip such an iteration, or
            the update failed.
    """
    if record := iteration.record("update"):
        return record
    progress.report(progress.StageStarted(iteration.iteration, "update"))
    adapted = iteration.finished("adapt")
    algorithm = run.algorithm
    if not adapted.values["coverage"]["trained"]:
        found = (
            f"iteration {iteration.iteration}: no row reaches the loss; rollouts: "
            f"{adapted.values['coverage']}, rows: {adapted.values['rows']}"
        )
        if algorithm.batch_settings.on_empty == "fail":
            raise TrainerError(found)
        if algorithm.batch_settings.learns:
            logger.warning("%s; the update is skipped", found)
        with iteration.stage("update") as stage:
            state = algorithm.skip(state_before(run, iteration))
            stage.put_json("state", state.model_dump(mode="json"))
        return iteration.finished("update")

    def read_batch() -> pa.Table:
        rows = files.read_table(iteration.storage, adapted.file("batch"), BATCH_ROWS)
        return rows.filter(pc.is_null(rows["drop_reason"]))

    with iteration.stage("update") as stage:
        state = await algorithm.learn(state_before(run, iteration), Experience(read_batch, stage))
        stage.put_json("state", state.model_dump(mode="json"))
        metrics = stage.outputs.get("update_metrics")
        if isinstance(metrics, FileRef):
            stage.values["metrics"] = mean_metrics(iteration.storage, metrics)
    return iteration.finished("update")


async def export(run: PreparedRun, iteration: IterationLedger) -> StageRecord:
    """Write the policy version that the update made, if it made one."""
    if record := iteration.record("export"):
        return record
    progress.report(progress.StageStarted(iteration.iteration, "export"))
    algorithm = run.algorithm
    with iteration.stage("export") as stage:
        state = await algorithm.export(read_state(run, iteration, "update"), stage)
        stage.put_json("state", state.model_dump(mode="json"))
    return iteration.finished("export")


def read_state(run: PreparedRun, iteration: IterationLedger, stage: str) -> Any:
    """Return the algorithm's state as a finished stage left it."""
    file = iteration.finished(stage).file("state")
    return files.read_model(iteration.storage, file, run.algorithm.state_type)
