"""Write an iteration's manifest: every file with its sha256 and rows, coverage, cost, content
digest.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.chain import changes_until, differences_of, earlier_files
from agl_core.ledger.digest import json_digest, table_digest
from agl_core.ledger.manifest import Cost, Difference, Manifest, RewardSummary
from agl_core.ledger.recount import Recount, check_collected, check_stated, recount
from agl_core.ledger.run import RunLedger, RunRecord
from agl_core.ledger.stages import STAGES, IterationLedger, StageRecord
from agl_core.ledger.storage import Storage
from agl_core.ledger.tables import BATCH_ROWS, OUTCOMES, TRIPLETS
from agl_core.types.outcome import FailureKind
from agl_core.types.training import FileRef, PolicyRef

_NEEDED = ("propose", "publish", "rollout", "collect", "adapt", "update", "export")
"""Stages of every iteration; the others are there only where something is validated."""
_TRIPLET_COLUMNS = {
    2: ("index", "call_index", "prompt_ids", "response_ids", "logprobs", "reward", "rewards"),
    3: (
        *("index", "call_index", "prompt_ids", "response_ids", "logprobs", "reward", "rewards"),
        *("temperature", "sampling", "max_tokens", "output_tokens"),
    ),
}
"""Columns in the content digest, by the version of the table that holds them."""
_BATCH_COLUMNS = {
    1: ("row", "index", "group", "response_mask", "reward", "drop_reason"),
    2: (
        *("row", "index", "group", "call_index", "step", "num_calls"),
        *("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "token_rewards"),
        *("reward", "rollout_reward", "truncated", "drop_reason"),
    ),
}


def commit(iteration: IterationLedger, run: RunRecord, prefect: dict[str, Any]) -> Manifest:
    """Write the manifest of an iteration whose stages have all finished.

    Args:
        iteration: The iteration.
        run: Identity of its run.
        prefect: Ids of the Prefect runs, for `observed`.

    Raises:
        LedgerError: A rollout is unaccounted for, a stage has no record, or one states something
            else than the records say.
        LeaseLostError: Another process carries the run on.
        ConflictError: The iteration was committed by another process.
    """
    ledger = RunLedger(iteration.storage, iteration.run_id)
    stages = read_stages(iteration)
    start = iteration.lease.number if iteration.lease else None
    manifest = build_manifest(
        iteration,
        stages,
        run,
        changed=differences_of(changes_until(ledger, iteration.iteration)),
        listed=_all_files(iteration, stages.values()),
        earlier=earlier_files(ledger, iteration.iteration, start),
        start=start,
        prefect=prefect,
    )
    iteration.check_lease()
    files.put_json(iteration.storage, iteration.manifest_key, manifest.model_dump(mode="json"))
    return manifest


def read_stages(iteration: IterationLedger) -> dict[str, StageRecord]:
    """Return the records of an iteration whose stages have all finished, in order.

    Raises:
        LedgerError: One has no record.
    """
    stages = {name: record for name in STAGES if (record := iteration.record(name))}
    for name in _NEEDED:
        if name not in stages:
            raise LedgerError(f"iteration {iteration.iteration}: stage {name} has no record")
    return stages


def build_manifest(
    iteration: IterationLedger,
    stages: Mapping[str, StageRecord],
    run: RunRecord,
    *,
    changed: Sequence[Difference],
    listed: Sequence[FileRef],
    earlier: Sequence[FileRef],
    start: int | None,
    prefect: Mapping[str, Any],
) -> Manifest:
    """Return what the manifest of an iteration has to say, everything counted from its files.

    Args:
        iteration: The iteration.
        stages: Records of its stages.
        run: Identity of its run, with code and packages of the start that commits it.
        changed: What starts up to then were allowed to change.
        listed: Every file of the iteration.
        earlier: Files of the run that were there before.
        start: The start that commits it; None where no process holds the run.
        prefect: Ids of the Prefect runs.

    Raises:
        LedgerError: A rollout is unaccounted for, or a stage states something else than its files
            say.
    """
    coverage, rows, calls = _checked_coverage(iteration, stages, run.config.pass_reward)
    if coverage.unknown:
        raise LedgerError(
            f"iteration {iteration.iteration}: {coverage.unknown} rollouts are unaccounted for: "
            f"{coverage}"
        )
    check_stated(iteration, stages)
    state = files.read_json(iteration.storage, stages["export"].file("state"))
    policy_in = PolicyRef.model_validate(stages["propose"].values["policy_in"])
    policy_out = PolicyRef.model_validate(state["policy"])
    return Manifest(
        run_id=iteration.run_id,
        iteration=iteration.iteration,
        identity=run.model_dump(mode="json", exclude={"created"}),
        changed=tuple(changed),
        policy_in=policy_in,
        policy_out=policy_out if policy_out != policy_in else None,
        state=state,
        coverage=coverage,
        rows=rows,
        calls=calls,
        tokens=stages["adapt"].values.get("tokens"),
        breaks=stages["adapt"].values.get("breaks", {}),
        rewards=RewardSummary.model_validate(stages["collect"].values["rewards"]),
        validation=_validation(stages),
        update=stages["update"].values.get("metrics", {}),
        cost=_cost(iteration, stages),
        files=tuple(listed),
        earlier=tuple(earlier),
        content_digest=content_digest(iteration, run, stages, policy_out),
        observed={
            "prefect": dict(prefect),
            "start": start,
            "stages": {
                name: record.model_dump(exclude={"outputs", "values", "stage"})
                for name, record in stages.items()
            },
        },
    )


def _checked_coverage(
    iteration: IterationLedger, stages: Mapping[str, StageRecord], pass_reward: float
) -> Recount:
    """Return the coverage as counted from the records, after the update, and demand that `adapt`
    states what it was before.

    Raises:
        LedgerError: They do not.
    """
    for name in ("evaluate_base", "evaluate"):
        if name in stages:
            check_collected(iteration, stages[name], pass_reward)
    adapted = stages["adapt"]
    before, after = recount(iteration, stages["collect"], adapted, stages["update"], pass_reward)
    for name, counted in before._asdict().items():
        if counted is not None and type(counted).model_validate(adapted.values[name]) != counted:
            raise LedgerError(
                f"iteration {iteration.iteration}: stage adapt states {name} "
                f"{adapted.values[name]}, the records say {counted}"
            )
    return after


def _validation(stages: Mapping[str, StageRecord]) -> dict[str, RewardSummary]:
    found: dict[str, RewardSummary] = {}
    for name in ("evaluate_base", "evaluate"):
        if name in stages:
            summary = RewardSummary.model_validate(stages[name].values["rewards"])
            found[summary.policy_version] = summary
    return found


def _cost(iteration: IterationLedger, stages: Mapping[str, StageRecord]) -> Cost:
    """Add up calls and tokens over every recorded attempt, training and validation."""
    totals = {"model_calls": 0, "prompt_tokens": 0, "completion_tokens": 0}
    failed, failed_tokens = 0, 0
    for name in ("collect", "evaluate_base", "evaluate"):
        if name not in stages:
            continue
        outcomes = files.read_table(
            iteration.storage,
            stages[name].file("outcomes"),
            OUTCOMES,
            ["kind", "num_calls", "prompt_tokens", "completion_tokens"],
        )
        totals["model_calls"] += pc.sum(outcomes["num_calls"]).as_py() or 0
        totals["prompt_tokens"] += pc.sum(outcomes["prompt_tokens"]).as_py() or 0
        totals["completion_tokens"] += pc.sum(outcomes["completion_tokens"]).as_py() or 0
        lost = outcomes.filter(pc.not_equal(outcomes["kind"], FailureKind.SUCCEEDED.value))
        failed += len(lost)
        tokens = pc.add(lost["prompt_tokens"], lost["completion_tokens"])
        failed_tokens += pc.sum(tokens).as_py() or 0
    return Cost(
        **totals,
        failed_attempts=failed,
        failed_attempt_tokens=failed_tokens,
        stage_seconds={name: record.seconds for name, record in stages.items()},
    )


def _all_files(iteration: IterationLedger, records: Iterable[StageRecord]) -> list[FileRef]:
    """Return a reference to every file of the iteration; those without one yet are hashed in
    parts.
    """
    known = {file.key: file for record in records for file in record.all_files()}
    found: list[FileRef] = []
    for key in iteration.storage.list(iteration.prefix):
        if key not in known:
            known[key] = files.refer(iteration.storage, key)
        found.append(known[key])
    return found


def content_digest(
    iteration: IterationLedger,
    run: RunRecord,
    stages: Mapping[str, StageRecord],
    policy_out: PolicyRef,
) -> str:
    """Digest what was learned from what; see the description of `agl_core.ledger.manifest`."""
    storage, adapted = iteration.storage, stages["adapt"]
    return json_digest(
        {
            "datasets": {name: ref.digest for name, ref in run.datasets.items()},
            "triplets": _digest(storage, adapted.file("triplets"), TRIPLETS, _TRIPLET_COLUMNS),
            "batch": _digest(storage, adapted.file("batch"), BATCH_ROWS, _BATCH_COLUMNS),
            "update_metrics": stages["update"].values.get("metrics", {}),
            "weights": policy_out.weights_digest,
        }
    )


def _digest(
    storage: Storage, file: FileRef, schema: pa.Schema, columns: dict[int, tuple[str, ...]]
) -> str:
    with files.open_table(storage, file, schema) as table:
        names = columns[table.version]
        return table_digest(table.read(names), names)
