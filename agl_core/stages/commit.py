"""The last stage, `commit`: write the manifest."""

from collections import Counter
from typing import Any

from agl_core import progress
from agl_core.ledger import commit as ledger_commit
from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.manifest import Manifest
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.tables import OUTCOMES
from agl_core.prepared import PreparedRun
from agl_core.types.outcome import FailureKind


def commit(run: PreparedRun, iteration: IterationLedger, prefect: dict[str, Any]) -> None:
    """Write the manifest; an iteration that has one is left as it is.

    Args:
        run: Whose iteration it is.
        iteration: One whose stages have all finished.
        prefect: Ids of the Prefect runs; empty without Prefect.
    """
    if not iteration.storage.exists(iteration.manifest_key):
        progress.report(progress.StageStarted(iteration.iteration, "commit"))
        ledger_commit.commit(iteration, run.record, prefect)


def read_manifest(iteration: IterationLedger) -> Manifest:
    """Return the manifest of a committed iteration."""
    return files.read_model(iteration.storage, Unrecorded(iteration.manifest_key), Manifest)


def report_committed(iteration: IterationLedger) -> Manifest:
    """Tell the listener of an iteration that was just committed, and return its manifest."""
    manifest = read_manifest(iteration)
    failure = most_frequent_failure(iteration) if manifest.rewards.failures else ""
    progress.report(progress.IterationCommitted(manifest, failure))
    return manifest


def most_frequent_failure(iteration: IterationLedger) -> str:
    """Return how often and how most of the failed training rollouts ended, as one line; empty
    where none failed.
    """
    file = iteration.finished("collect").file("outcomes")
    outcomes = files.read_table(iteration.storage, file, OUTCOMES, ["kind", "message", "final"])
    failures = Counter(
        f"{row['kind']}: {' '.join(row['message'].split())}"
        for row in outcomes.filter(outcomes["final"]).to_pylist()
        if row["kind"] != FailureKind.SUCCEEDED
    )
    if not failures:
        return ""
    ((text, times),) = failures.most_common(1)
    return f"{times} of {failures.total()} failures: {text}"
