import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from agl_core.config import RunConfig
from agl_core.errors import ConfigError, LedgerError
from agl_core.ledger.chain import seal
from agl_core.ledger.collect import collect_set
from agl_core.ledger.commit import commit
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import BaseModelRecord, RunLedger, RunRecord, open_run
from agl_core.ledger.tables import UPDATE_ROWS
from agl_core.ledger.verify import find_late, verify_run
from agl_core.trajectory.coverage import rollout_coverage, row_coverage
from agl_core.types.training import Proposal
from tests.builders import (
    POLICY,
    make_call,
    make_outcomes,
    make_requests,
    make_rows,
    make_spans,
    make_triplets,
)

CONFIG = RunConfig.model_validate(
    {
        "run_id": "run",
        "ledger": "ledger",
        "agent": "a:b",
        "train_data": "rows.jsonl",
        "algorithm": {"config": {}},
    }
)


def write_stages(
    ledger: RunLedger, number: int, update_reason: str | None = None, **second: Any
) -> None:
    """Write every stage of an iteration of two rollouts, both trained unless the second failed or
    the update drops its row.
    """
    iteration = ledger.iteration(number)
    rollouts = RolloutSet(iteration, "train")
    outcomes = make_outcomes({"index": 0}, {"index": 1, **second})
    rows = make_rows([0], [None]) if second else make_rows([0, 1], [None, None])
    with iteration.stage("propose") as stage:
        stage.values["policy_in"] = POLICY.model_dump(mode="json")
        proposal = Proposal(policy=POLICY, sampling_parameters={}, requests=())
        stage.put_json("proposal", proposal.model_dump(mode="json"))
    with iteration.stage("publish"):
        rollouts.write_requests(make_requests(2), POLICY, {})
    with iteration.stage("rollout") as stage:
        rollouts.claim([0, 1])
        rollouts.put_chunk(1, 1, make_spans(make_call(0), make_call(1)), outcomes)
        rollouts.record(stage)
    with iteration.stage("collect") as stage:
        summary = collect_set(rollouts, stage, POLICY, pass_reward=1.0)
        stage.values |= {"rewards": summary.model_dump(mode="json"), "rollout_set": "train"}
    with iteration.stage("adapt") as stage:
        stage.put_table("triplets", make_triplets(*({"index": i, "group": 0} for i in (0, 1))))
        stage.put_table("batch", rows)
        stage.values["coverage"] = rollout_coverage(2, outcomes, rows).model_dump(mode="json")
        stage.values["rows"] = row_coverage(rows).model_dump(mode="json")
    with iteration.stage("update") as stage:
        updated = [
            {"row": row, "drop_reason": update_reason if row == 1 else None}
            for row in reversed(range(len(rows)))
        ]
        stage.put_table("update_rows", pa.Table.from_pylist(updated, schema=UPDATE_ROWS))
    with iteration.stage("export") as stage:
        stage.put_json("state", {"policy": POLICY.model_dump(mode="json")})


@pytest.fixture
def ledger(tmp_path: Path) -> RunLedger:
    """A run of two committed iterations."""
    ledger = open_run(str(tmp_path), "run")
    dataset = ledger.dataset("train", ["{}", "{}"])
    run = RunRecord(
        run_id="run",
        config=CONFIG,
        datasets={"train": dataset.ref},
        base=BaseModelRecord(
            policy=POLICY, tokenizer_digest="", chat_template_digest=None, licence="unknown"
        ),
        code={},
        packages={},
        conditional_put=True,
        created=0.0,
    )
    ledger.start(run, [dataset])
    for number in range(2):
        write_stages(ledger, number)
        commit(ledger.iteration(number), run, {})
    return ledger


def path_of(ledger: RunLedger, key: str) -> Path:
    path = ledger.storage.local_path(key)
    assert path is not None
    return path


def edit(ledger: RunLedger, key: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = path_of(ledger, key)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_manifest(ledger: RunLedger, change: Callable[[dict[str, Any]], object]) -> None:
    edit(ledger, ledger.iteration(1).manifest_key, change)


def test_a_run_as_it_was_written_has_no_difference(ledger: RunLedger):
    assert verify_run(ledger) == []


@pytest.mark.parametrize(
    ("reason", "counted", "reasons"),
    [
        ("rejected", {"trained": 1, "filtered": 1}, {"rejected": 1}),
        ("no_peer_at_step", {"trained": 1, "filtered": 1}, {"no_peer_at_step": 1}),
        ("no_weight", {"trained": 2, "filtered": 0}, {}),  # the batch's masks say that
    ],
)
def test_a_row_that_the_update_drops_is_filtered_for_its_reason(
    ledger: RunLedger, reason: str, counted: dict[str, int], reasons: dict[str, int]
):
    write_stages(ledger, 2, update_reason=reason)
    manifest = commit(ledger.iteration(2), ledger.record(), {})
    assert manifest.coverage.model_dump(include=set(counted)) == counted
    assert manifest.coverage.reasons == reasons
    assert manifest.rows.dropped == reasons
    assert manifest.rows.trained == counted["trained"]
    assert verify_run(ledger) == []


def test_a_changed_dataset_is_found(ledger: RunLedger):
    path = path_of(ledger, ledger.record().datasets["train"].file.key)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (difference,) = verify_run(ledger)
    assert "/data/train-" in difference
    assert "has sha256" in difference


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["coverage"].update(trained=1, filtered=1), "iteration 1: coverage is"),
        (lambda m: m["rows"].update(built=9, trained=9), "iteration 1: rows is"),
        (lambda m: m.update(content_digest="sha256:00"), "iteration 1: content_digest is"),
        (lambda m: m["policy_in"].update(weights_digest="x"), "iteration 1 starts from v000000"),
    ],
)
def test_a_manifest_that_says_something_else_than_its_files_is_found(
    ledger: RunLedger, change: Callable[[dict[str, Any]], object], message: str
):
    edit_manifest(ledger, change)
    (difference,) = verify_run(ledger)
    assert difference.startswith(message)


def test_a_missing_manifest_in_the_middle_is_found(ledger: RunLedger):
    path_of(ledger, ledger.iteration(0).manifest_key).unlink()
    (difference,) = verify_run(ledger)
    assert difference.endswith("the manifest of iteration 0 is missing")


def test_an_iteration_without_one_of_its_stages_is_not_committed(ledger: RunLedger):
    iteration = ledger.iteration(0)
    path_of(ledger, f"{iteration.prefix}stages/adapt.json").unlink()
    with pytest.raises(LedgerError, match="iteration 0: stage adapt has no record"):
        commit(iteration, ledger.record(), {})


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        ("adapt", {"coverage": {"trained": 1, "masked": 1}}, "stage adapt states coverage"),
        ("adapt", {"rows": {"trained": 1, "masked": 1}}, "stage adapt states rows"),
        ("collect", {"rewards": {"rewarded": 1}}, "2 rollouts were expected and 2 have a reward"),
    ],
)
def test_a_stage_that_states_something_else_than_the_records_is_not_committed(
    ledger: RunLedger, stage: str, change: dict[str, dict[str, int]], message: str
):
    iteration = ledger.iteration(2)
    write_stages(ledger, 2)
    path = path_of(ledger, f"{iteration.prefix}stages/{stage}.json")
    record = json.loads(path.read_text())
    for name, values in change.items():
        record["values"][name].update(values)
    path.write_text(json.dumps(record))
    with pytest.raises(LedgerError, match=message):
        commit(iteration, ledger.record(), {})
    assert not ledger.storage.exists(iteration.manifest_key)


def test_a_failed_rollout_may_hold_the_reward_that_its_agent_gave(ledger: RunLedger):
    write_stages(ledger, 2, kind="no_trace", reward=1.0)
    manifest = commit(ledger.iteration(2), ledger.record(), {})
    assert (manifest.coverage.trained, manifest.coverage.failed) == (1, 1)
    assert manifest.rewards.rewarded == 1
    assert verify_run(ledger) == []


def test_collected_outcomes_that_no_shard_flushed_are_not_committed(ledger: RunLedger):
    iteration = ledger.iteration(2)
    write_stages(ledger, 2)
    edit(ledger, f"{iteration.prefix}stages/rollout.json", lambda r: r["outputs"].clear())
    rollouts = RolloutSet(iteration, "train")
    rollouts.claim([1])  # a later claim decides: what was collected of rollout 1 no longer counts
    with pytest.raises(LedgerError, match="has other outcomes than the shards flushed for train"):
        commit(iteration, ledger.record(), {})


def test_a_chunk_that_a_zombie_flushes_after_the_commit_is_late_and_no_difference(
    ledger: RunLedger,
):
    rollouts = RolloutSet(ledger.iteration(1), "train")
    assert find_late(ledger) == []
    chunk = rollouts.put_chunk(1, 2, make_spans(make_call(0)), make_outcomes({"index": 0}))
    assert verify_run(ledger) == []
    assert find_late(ledger) == [chunk.outcomes.key, chunk.spans.key]

    stranger = f"{rollouts.prefix}chunks/0007-0001.spans.parquet"
    ledger.storage.write_once(stranger, b"")
    assert verify_run(ledger) == [f"{stranger} is not in the manifest of iteration 1"]
    assert stranger not in find_late(ledger)


def test_a_run_that_is_refused_leaves_nothing(ledger: RunLedger):
    before = ledger.storage.list("")
    record = ledger.record()
    changed = ledger.dataset("train", ["[]"])
    with pytest.raises(ConfigError, match=r"run 'run' exists in .*: datasets\.train was"):
        ledger.start(record.model_copy(update={"datasets": {"train": changed.ref}}), [changed])
    assert ledger.storage.list("") == before


def test_what_a_zombie_flushes_after_the_record_of_its_stage_is_not_read(ledger: RunLedger):
    iteration = ledger.iteration(2)
    write_stages(ledger, 2)
    late = RolloutSet(iteration, "train")
    late.claim([1])
    late.put_chunk(2, 1, make_spans(make_call(1)), make_outcomes({"index": 1, "reward": 0.0}))
    manifest = commit(iteration, ledger.record(), {})
    assert manifest.rewards.mean_reward == 1.0
    assert len(RolloutSet.recorded(iteration, "train").outcomes()) == 2
    assert verify_run(ledger) == []


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("resources.json", RolloutSet.read_resources),
        ("requests.parquet", RolloutSet.read_requests),
        ("claims/0001.json", RolloutSet.claims),
        ("chunks/0001-0001.outcomes.parquet", RolloutSet.outcomes),
        ("chunks/0001-0001.spans.parquet", lambda rollouts: list(rollouts.iter_spans())),
    ],
)
def test_a_recorded_file_of_a_set_that_was_changed_is_not_read(
    ledger: RunLedger, name: str, read: Callable[[RolloutSet], object]
):
    rollouts = RolloutSet.recorded(ledger.iteration(1), "train")
    path = path_of(ledger, rollouts.prefix + name)
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(LedgerError, match=rf"{name} has sha256 [0-9a-f]+, its record says"):
        read(rollouts)


def test_requests_that_were_changed_before_their_stage_ended_are_not_read(ledger: RunLedger):
    rollouts = RolloutSet(ledger.iteration(1), "train")
    path = path_of(ledger, rollouts.requests_key)
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(LedgerError, match="has sha256"):
        rollouts.read_requests()


BREAKABLE = (
    "run.json",
    "changes/0001.json",
    "starts/000001.start.json",
    "seals/000002.json",
    "iterations/000000/manifest.json",
    "iterations/000001/manifest.json",
    "iterations/000001/stages/adapt.json",
    "iterations/000001/rollouts/train/claims/0001.json",
    "iterations/000001/export/a1/state.json",
)


def test_broken_json_is_one_sentence(ledger: RunLedger):
    ledger.starts.begin(committed=0, max_automatic=1).end("done")
    record = ledger.record()
    config = record.config.model_copy(update={"seed": 9})
    ledger.start(record.model_copy(update={"config": config}), allow_changed=True)
    seal(ledger)
    assert verify_run(ledger) == []
    for name in BREAKABLE:
        path = path_of(ledger, ledger.prefix + name)
        content = path.read_bytes()
        for broken in (b"", content[:40], content.replace(b"{", b"[", 1)):
            path.write_bytes(broken)
            found = verify_run(ledger)
            assert name in found[0]
            assert not any("\n" in sentence for sentence in found)
        path.write_bytes(content)
    assert verify_run(ledger) == []


def test_a_changed_manifest_is_named_by_the_next_one(ledger: RunLedger):
    key = ledger.iteration(0).manifest_key
    edit(ledger, key, lambda m: m["observed"]["prefect"].update(flow_run_id="another"))
    (difference,) = verify_run(ledger)
    assert difference.startswith(f"{key} has sha256")
    with pytest.raises(LedgerError, match="has sha256"):
        ledger.manifests()


def test_a_seal_names_the_last_manifest_and_what_is_beside_the_iterations(ledger: RunLedger):
    ledger.starts.begin(committed=2, max_automatic=1).end("done")
    ledger.storage.write_once(ledger.plot_key, b"a picture")
    seal(ledger)
    assert verify_run(ledger) == []
    seal(ledger)  # stays
    edit_manifest(ledger, lambda m: m["observed"]["prefect"].update(flow_run_id="another"))
    ledger.storage.replace(ledger.plot_key, b"another picture")
    edit(ledger, ledger.starts.end_key(1), lambda end: end.update(reason="failed"))
    assert [line.split(" has sha256")[0] for line in verify_run(ledger)] == [
        ledger.iteration(1).manifest_key,
        ledger.plot_key,
        ledger.starts.end_key(1),
    ]


def test_a_run_that_goes_on_after_its_seal_is_still_as_recorded(ledger: RunLedger):
    ledger.storage.write_once(ledger.plot_key, b"a picture")
    seal(ledger)
    write_stages(ledger, 2)
    manifest = commit(ledger.iteration(2), ledger.record(), {})
    assert ledger.plot_key in {file.key for file in manifest.earlier}
    seal(ledger)
    assert verify_run(ledger) == []


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        ("collect", {"rewards": {"mean_reward": 9.0}}, "counted again the rewards are"),
        ("collect", {"rewards": {"pass_rate": 0.0}}, "counted again the rewards are"),
        ("collect", {"rewards": {"annotations": {"x": 1.0}}}, "counted again the rewards are"),
        ("propose", {"policy_in": {"weights_digest": "x"}}, "stage propose states policy_in"),
    ],
)
def test_figures_of_a_stage_are_counted_again(
    ledger: RunLedger, stage: str, change: dict[str, dict[str, Any]], message: str
):
    iteration = ledger.iteration(2)
    write_stages(ledger, 2)
    key = f"{iteration.prefix}stages/{stage}.json"
    for name, values in change.items():
        edit(ledger, key, lambda r, n=name, v=values: r["values"][n].update(v))
    with pytest.raises(LedgerError, match=message):
        commit(iteration, ledger.record(), {})


def test_an_identity_that_was_changed_after_a_commit_is_refused_at_the_next_start(
    ledger: RunLedger,
):
    record = ledger.record()
    edit(ledger, ledger.record_key, lambda r: r.update(created=7.0))
    with pytest.raises(LedgerError, match=r"run\.json has sha256 .* its record says"):
        ledger.start(record)
