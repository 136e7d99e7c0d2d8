"""Stage `adapt`: spans to triplets, triplets to batch rows with the reason for each row that is
dropped.
"""

import logging
from pathlib import Path

import pyarrow as pa

from agl_core import progress
from agl_core.adapter.columns import spans_to_triplets
from agl_core.ledger import files
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.ledger.tables import OUTCOMES, SPANS, TRIPLETS
from agl_core.prepared import PreparedRun
from agl_core.stages.propose import TRAIN_SET
from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.breaks import count_breaks
from agl_core.trajectory.coverage import call_coverage, rollout_coverage, row_coverage
from agl_core.trajectory.credit import shuffle_rewards
from agl_core.trajectory.failed import failed_groups, rewarded_outcomes
from agl_core.trajectory.vocabulary import find_end_ids, find_vocabulary
from agl_core.types.outcome import DropReason
from agl_core.types.training import FileRef

logger = logging.getLogger(__name__)


def adapt(run: PreparedRun, iteration: IterationLedger) -> StageRecord:
    """Write `triplets`, `batch` and `breaks` from the collected tables, and count what became of
    everything.

    Raises:
        TraceError: A row is too long, and the algorithm's settings say that this is an error.
    """
    if record := iteration.record("adapt"):
        return record
    progress.report(progress.StageStarted(iteration.iteration, "adapt"))
    collected = iteration.finished("collect")
    outcomes = files.read_table(iteration.storage, collected.file("outcomes"), OUTCOMES)
    groups = RolloutSet.recorded(iteration, TRAIN_SET).read_requests(["index", "group"])
    failures = run.config.failures
    rewarded = rewarded_outcomes(outcomes, failures)
    triplets = _read_triplets(iteration, collected.file("spans"), rewarded, groups)
    if run.config.control == "shuffled_rewards":
        triplets = shuffle_rewards(triplets, seed=run.config.seed * 100_003 + iteration.iteration)
    settings = run.algorithm.batch_settings
    vocabulary = None
    if settings.level == "trajectory":
        vocabulary = find_vocabulary(Path(run.algorithm.model_path).expanduser())
    end_ids = frozenset[int]()
    if settings.unfinished != "keep":
        end_ids = find_end_ids(Path(run.algorithm.model_path).expanduser())
    lost = failed_groups(outcomes, groups, failures)
    batch = build_batch(triplets, settings, vocabulary, failed_groups=lost, end_ids=end_ids)
    coverage = rollout_coverage(len(groups), outcomes, batch.rows)
    calls = call_coverage(len(triplets), batch.rows)
    if lost_calls := calls.dropped.get(DropReason.NO_TOKEN_IDS.value):
        logger.warning(
            "iteration %d: %d of %d model calls came without whole token ids or log-probs and are "
            "not trained on; their spans say why",
            iteration.iteration,
            lost_calls,
            calls.sampled,
        )
    with iteration.stage("adapt") as stage:
        stage.put_table("triplets", triplets)
        stage.put_table("batch", batch.rows)
        stage.put_table("breaks", batch.breaks)
        stage.values |= {
            "coverage": coverage.model_dump(mode="json"),
            "rows": row_coverage(batch.rows).model_dump(mode="json"),
            "calls": calls.model_dump(mode="json"),
            "tokens": batch.tokens.model_dump(mode="json"),
            "breaks": count_breaks(batch.breaks),
        }
    return iteration.finished("adapt")


def _read_triplets(
    iteration: IterationLedger, spans_file: FileRef, outcomes: pa.Table, groups: pa.Table
) -> pa.Table:
    """Adapt the spans one flush at a time (a rollout's spans are never split between two)."""
    parts = [
        spans_to_triplets(spans, outcomes, groups)
        for spans in files.iter_tables(iteration.storage, spans_file, SPANS)
    ]
    merged = pa.concat_tables([TRIPLETS.empty_table(), *parts])
    return merged.sort_by([("index", "ascending"), ("call_index", "ascending")])
