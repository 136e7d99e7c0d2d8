"""The checker finds each fault that is planted into a copy of a good ledger, and names it."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.chaos.agents import PLAN, Plan
from tests.chaos.checker import check_run
from tests.chaos.model_server import ALWAYS, DeterministicEngine
from tests.chaos.process import run_here
from tests.chaos.runs import chaos_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_api")]

RUN = "good"
FIRST = Path("runs", RUN, "iterations", "000000")
CHUNK = FIRST / "rollouts/train/chunks/0001-0001.outcomes.parquet"
SPANS = FIRST / "rollouts/train/chunks/0001-0001.spans.parquet"
BATCH = FIRST / "adapt/a1/batch.parquet"
COLLECTED = FIRST / "collect/a1/outcomes.parquet"
REQUESTS = FIRST / "rollouts/train/requests.parquet"


@pytest.fixture(scope="module")
def good(deterministic: DeterministicEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with two iterations, in which some rollouts failed."""
    folder = tmp_path_factory.mktemp("good")
    plan = folder / "plan.json"
    Plan(("raises",), seed=3, share=0.2, times=ALWAYS).write(plan)
    config = chaos_config(deterministic.url, str(folder / "ledger"), RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAN, str(plan))
        assert run_here(config) is None
    return folder / "ledger"


@pytest.fixture(scope="module")
def good_joined(
    deterministic: DeterministicEngine, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A ledger whose rows are trajectories, with a canary; failures drop groups or count 0."""
    folder = tmp_path_factory.mktemp("joined")
    plan = folder / "plan.json"
    Plan(("raises", "no_reward"), seed=5, share=0.3, times=ALWAYS).write(plan)
    config = chaos_config(
        deterministic.url,
        str(folder / "ledger"),
        RUN,
        iterations=1,
        val_data=None,
        failures={
            "agent_error": {"attempts": 1, "then": "drop_group"},
            "no_reward": {"attempts": 1, "then": "zero"},
        },
        verl={"agentlightning.trace_aggregator.level": "trajectory"},
        preflight={"canary": True},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAN, str(plan))
        assert run_here(config) is None
    return folder / "ledger"


@pytest.fixture
def joined(good_joined: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good_joined, tmp_path / "joined")


@pytest.fixture
def ledger(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "ledger")  # copies the times too


def change_rows(ledger: Path, key: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change a table, and let the manifest say so."""
    table = pq.read_table(ledger / key)
    rows = table.to_pylist()
    rows = change(rows) or rows
    stored = (ledger / key).stat().st_mtime_ns
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), ledger / key)
    os.utime(ledger / key, ns=(stored, stored))
    list_again(ledger, key)


def list_again(ledger: Path, key: Path) -> None:
    content = (ledger / key).read_bytes()

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"] = [file for file in manifest["files"] if file["key"] != str(key)]
        sha256 = hashlib.sha256(content).hexdigest()
        manifest["files"].append(
            {"key": str(key), "sha256": sha256, "size_bytes": len(content), "rows": None}
        )

    change_manifest(ledger, change)


def change_manifest(ledger: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = ledger / FIRST / "manifest.json"
    stored = path.stat().st_mtime_ns
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    os.utime(path, ns=(stored, stored))


def found(ledger: Path) -> set[str]:
    return {violation.check for violation in check_run(ledger, RUN)}


def first(rows: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    return next(row for row in rows if all(row[name] == value for name, value in values.items()))


def test_a_good_ledger_has_no_violation(good: Path):
    manifest = json.loads((good / FIRST / "manifest.json").read_text())
    assert manifest["coverage"]["failed"] > 0
    assert check_run(good, RUN) == []


def test_a_changed_byte_is_found(ledger: Path):
    path = ledger / BATCH
    stored = path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stored, stored))
    assert "sha256" in found(ledger)


def test_a_missing_file_is_found(ledger: Path):
    (ledger / FIRST / "update/a1/update_metrics.parquet").unlink()
    assert found(ledger) == {"sha256"}


def test_a_file_that_was_written_after_the_manifest_is_found(ledger: Path):
    (ledger / BATCH).touch()
    assert found(ledger) == {"written_late"}


def test_a_file_that_no_manifest_lists_is_found(ledger: Path):
    (ledger / FIRST / "adapt/a1/more.json").write_text("{}")
    assert found(ledger) == {"unlisted"}


def test_a_late_chunk_of_a_zombie_is_no_violation(ledger: Path):
    for name in ("spans", "outcomes"):
        path = ledger / FIRST / f"rollouts/train/chunks/0001-0001.{name}.parquet"
        shutil.copy(path, path.with_name(f"0001-0099.{name}.parquet"))
    assert found(ledger) == set()


def test_a_request_that_the_manifest_does_not_expect_is_found(ledger: Path):
    change_rows(ledger, REQUESTS, lambda rows: [*rows, {**rows[-1], "index": 16}])
    assert found(ledger) >= {"expected", "deciding"}


def test_a_rollout_without_a_deciding_outcome_is_found(ledger: Path):
    change_rows(ledger, CHUNK, lambda rows: rows[-1].update(final=False))
    assert "deciding" in found(ledger)


def test_two_deciding_outcomes_are_found(ledger: Path):
    change_rows(ledger, COLLECTED, lambda rows: [*rows, first(rows, final=True)])
    assert found(ledger) == {"deciding"}


def test_an_outcome_that_does_not_decide_is_found_in_training(ledger: Path):
    change_rows(ledger, COLLECTED, lambda rows: rows[0].update(attempt_id="at-other"))
    assert found(ledger) == {"deciding"}


def test_a_reward_for_a_failure_is_found(ledger: Path):
    for path in (ledger / FIRST).glob("rollouts/train/chunks/*.outcomes.parquet"):
        rows = pq.read_table(path).to_pylist()
        if failed := [row for row in rows if row["kind"] != "succeeded"]:
            index = failed[0]["index"]
            break
    else:
        raise AssertionError("no rollout failed")

    def invent(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["index"] == index:
                row["reward"] = 0.0

    change_rows(ledger, path.relative_to(ledger), invent)
    change_rows(ledger, COLLECTED, invent)
    assert found(ledger) == {"reward"}


def test_a_reward_that_no_agent_gave_is_found(ledger: Path):
    index = first(pq.read_table(ledger / CHUNK).to_pylist(), kind="succeeded")["index"]

    def invent(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["index"] == index and row["reward"] is not None:
                row["reward"] = 0.5

    for key in (CHUNK, COLLECTED, BATCH):
        change_rows(ledger, key, invent)
    assert found(ledger) == {"reward"}


def test_another_reward_in_the_batch_is_found(ledger: Path):
    change_rows(ledger, BATCH, lambda rows: rows[0].update(reward=1.0 - rows[0]["reward"]))
    assert found(ledger) == {"reward"}


def test_a_batch_row_that_was_not_recorded_is_found(ledger: Path):
    change_rows(ledger, BATCH, lambda rows: rows[0]["response_ids"].__setitem__(0, 7))
    assert found(ledger) == {"batch"}


def test_a_row_that_is_missing_from_the_batch_is_found(ledger: Path):
    change_rows(ledger, BATCH, lambda rows: rows[1:])
    assert found(ledger) >= {"batch", "rows"}


def test_a_rollout_that_is_used_twice_is_found(ledger: Path):
    change_rows(ledger, BATCH, lambda rows: [*rows, rows[0]])
    assert found(ledger) >= {"used_twice", "rows"}


def test_a_finished_rollout_that_is_claimed_again_is_found(ledger: Path):
    key = FIRST / "rollouts/train/claims/0002.json"
    rows = pq.read_table(ledger / CHUNK).to_pylist()
    claim = json.loads((ledger / FIRST / "rollouts/train/claims/0001.json").read_text())
    claim |= {"number": 2, "indices": [first(rows, kind="succeeded")["index"]]}
    (ledger / key).write_text(json.dumps(claim))
    stored = (ledger / COLLECTED).stat().st_mtime_ns
    os.utime(ledger / key, ns=(stored, stored))
    list_again(ledger, key)
    assert "run_again" in found(ledger)


@pytest.mark.parametrize("part", ["trained", "failed", "filtered"])
def test_counts_that_are_not_those_of_the_records_are_found(ledger: Path, part: str):
    def change(manifest: dict[str, Any]) -> None:
        manifest["coverage"][part] += 1
        manifest["coverage"]["expected"] += 1

    change_manifest(ledger, change)
    assert found(ledger) == {"coverage", "expected"}


def test_coverage_that_does_not_add_up_is_found(ledger: Path):
    change_manifest(ledger, lambda manifest: manifest["coverage"].update(unknown=1))
    assert found(ledger) == {"coverage"}


def test_row_counts_that_are_not_those_of_the_batch_are_found(ledger: Path):
    change_manifest(ledger, lambda manifest: manifest["rows"].update(built=1000))
    assert found(ledger) == {"rows"}


def test_an_iteration_that_starts_from_other_weights_is_found(ledger: Path):
    change_manifest(
        ledger, lambda manifest: manifest["state"]["policy"].update(weights_digest="sha256:0")
    )
    assert found(ledger) == {"policy"}


def test_joined_rows_dropped_groups_zeros_and_a_canary_are_no_violation(good_joined: Path):
    manifest = json.loads((good_joined / FIRST / "manifest.json").read_text())
    assert manifest["coverage"]["rewards_by_policy"] > 0
    assert manifest["coverage"]["reasons"]["group_failed"] > 0
    assert max(row["num_calls"] for row in pq.read_table(good_joined / BATCH).to_pylist()) == 2
    assert list((good_joined / FIRST / "rollouts/canary").rglob("*.outcomes.parquet"))
    assert check_run(good_joined, RUN) == []


def test_a_weighted_observation_is_found(joined: Path):
    def weight(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["num_calls"] == 2 and row["drop_reason"] is None)
        row["response_mask"] = [1] * len(row["response_mask"])

    change_rows(joined, BATCH, weight)
    assert found(joined) >= {"batch"}


def test_a_row_that_lacks_a_call_is_found(joined: Path):
    change_rows(joined, BATCH, lambda rows: first(rows, num_calls=2).update(num_calls=1))
    assert found(joined) == {"batch"}


def test_a_row_of_a_group_that_lost_a_rollout_is_found(joined: Path):
    change_rows(
        joined, BATCH, lambda rows: first(rows, drop_reason="group_failed").update(drop_reason=None)
    )
    assert found(joined) >= {"group", "rows", "tokens"}


def test_a_row_of_the_canary_is_found(joined: Path):
    requests = pq.read_table(joined / FIRST / "rollouts/canary/requests.parquet").to_pylist()
    change_rows(joined, BATCH, lambda rows: rows[0].update(rollout_id=requests[0]["rollout_id"]))
    assert found(joined) == {"batch"}


def test_a_reward_of_1_for_a_missing_one_is_found(joined: Path):
    rows = pq.read_table(joined / COLLECTED).to_pylist()
    index = first(rows, kind="no_reward", final=True)["index"]
    change_rows(joined, BATCH, lambda rows: first(rows, index=index).update(reward=1.0))
    assert found(joined) == {"reward"}


@pytest.mark.parametrize("part", ["trained", "sampled"])
def test_token_counts_that_are_not_those_of_the_rows_are_found(joined: Path, part: str):
    change_manifest(joined, lambda manifest: manifest["tokens"].update({part: 7}))
    assert found(joined) == {"tokens"}


def test_a_count_of_zeros_that_the_records_do_not_have_is_found(joined: Path):
    change_manifest(joined, lambda manifest: manifest["coverage"].update(rewards_by_policy=0))
    assert found(joined) == {"coverage"}


def test_a_start_without_an_end_before_a_later_one_is_found(ledger: Path):
    starts = ledger / "runs" / RUN / "starts"
    shutil.copy(starts / "000001.start.json", starts / "000002.start.json")
    assert found(ledger) == set()
    (starts / "000001.end.json").unlink()
    assert found(ledger) == {"starts"}
