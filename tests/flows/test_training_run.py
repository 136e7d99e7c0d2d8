"""The whole chain on real parts: Prefect server, engine, proxy, VERL, ledger."""

import asyncio
import copy
import json
import shutil
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.compute as pc
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter

from agl_core import semconv
from agl_core.config import RolloutSettings, ServingSettings
from agl_core.errors import ConfigError, IterationStopped, TrainerError
from agl_core.ledger import files
from agl_core.ledger.chain import leaves
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.stages import STAGES
from agl_core.ledger.tables import BATCH_ROWS, OUTCOMES, SPANS, TRIPLETS, UPDATE_ROWS
from agl_core.ledger.verify import RunCheck, verify_run
from agl_core.serving.attached import CONVERSATIONS
from agl_core.serving.launch import ModelServer
from tests.conftest import small_run, train

pytestmark = pytest.mark.usefixtures("prefect_api")


def test_every_stage_is_recorded_and_every_file_is_as_its_manifest_says(trained: RunLedger):
    manifests = trained.manifests()
    assert len(manifests) == 2
    first, second = (set(manifest.cost.stage_seconds) for manifest in manifests)
    assert first == set(STAGES)
    assert second == set(STAGES) - {"rollout_base", "evaluate_base"}
    assert verify_run(trained) == []


UNDETERMINED = {"observed.prefect.flow_run_id": "only Prefect knows it, and forgets it"}
"""Leaves of a run's last manifest that no other file says; the seal and, in a run that goes on, the
next manifest have its sha256."""


def test_every_changed_leaf_of_a_manifest_is_named(trained: RunLedger, tmp_path: Path):
    shutil.copytree(trained.storage.uri, tmp_path / "ledger")
    ledger = open_run(str(tmp_path / "ledger"), trained.run_id)
    shutil.rmtree(tmp_path / "ledger" / ledger.prefix / "seals")
    path = tmp_path / "ledger" / ledger.iteration(1).manifest_key
    content = path.read_bytes()
    manifest = json.loads(content)
    check = RunCheck(ledger)  # reads the other files once
    assert check.differences() == []
    before = trained.manifest(1).policy_in
    unseen: dict[str, object] = {}
    for name, leaf in leaves(manifest).items():
        changed = copy.deepcopy(manifest)
        _set(changed, name, _other(leaf))
        path.write_text(json.dumps(changed))
        if next(check.iteration(1, before), None) is None:
            unseen[name] = leaf
    assert set(unseen) == set(UNDETERMINED)
    path.write_bytes(content)
    assert verify_run(ledger) == []


def _other(leaf: object) -> object:
    """Another value of the same kind."""
    if isinstance(leaf, bool) or leaf is None:
        return not leaf
    if isinstance(leaf, int | float):
        return leaf + 1
    return [1] if isinstance(leaf, list) else {"more": 1} if isinstance(leaf, dict) else f"{leaf}x"


def _set(value: Any, path: str, leaf: object) -> None:
    """Replace the leaf that `leaves` gives this path."""
    for key in value if isinstance(value, dict) else range(len(value)):
        for inner, _ in leaves(value[key], "").items():
            own = f"{key}" if isinstance(value, dict) else f"[{key}]"
            joined = own + ("" if not inner or inner.startswith("[") else ".") + inner
            if joined == path and not inner:
                value[key] = leaf
                return
            if joined == path:
                _set(value[key], inner, leaf)
                return
    raise AssertionError(path)


@pytest.mark.parametrize("name", ["run.json", "starts/000001.end.json", "report/reward.png"])
def test_the_files_beside_the_iterations_are_covered(trained: RunLedger, tmp_path, name: str):
    shutil.copytree(trained.storage.uri, tmp_path / "ledger")
    ledger = open_run(str(tmp_path / "ledger"), trained.run_id)
    path = tmp_path / "ledger" / ledger.prefix / name
    path.write_bytes(path.read_bytes() + b" ")
    (difference,) = verify_run(ledger)
    assert f"{name} has sha256" in difference


def test_versions_form_a_chain(trained: RunLedger):
    first, second = trained.manifests()
    assert first.policy_in.version == "v000000"
    assert first.policy_out is not None
    assert first.policy_out == second.policy_in
    assert first.policy_out.weights_digest != first.policy_in.weights_digest
    assert list(first.validation) == ["v000000", "v000001"]
    assert list(second.validation) == ["v000002"]


def test_every_call_names_the_version_and_weights_that_served_it(trained: RunLedger):
    for manifest in trained.manifests():
        for stage, policy in [("collect", manifest.policy_in), ("evaluate", manifest.policy_out)]:
            assert policy is not None
            spans = _table(trained, manifest.iteration, stage, "spans", SPANS)
            calls = spans.filter(pc.equal(spans["name"], semconv.LLM_CALL_SPAN))
            assert len(calls) > 0
            assert pc.unique(calls["policy_version"]).to_pylist() == [policy.version]
            assert pc.unique(calls["weights_digest"]).to_pylist() == [policy.weights_digest]


def test_one_rollout_can_be_followed_from_dataset_row_to_loss_row(trained: RunLedger):
    iteration = trained.iteration(1)
    batch = _table(trained, 1, "adapt", "batch", BATCH_ROWS)
    row = batch.slice(0, 1).to_pylist()[0]
    requests = RolloutSet.recorded(iteration, "train").read_requests().to_pylist()
    request = requests[row["index"]]
    dataset = trained.record().datasets["train"]
    duck = duckdb.connect()
    path = trained.storage.local_path(dataset.file.key)
    source = duck.execute(f"select input from '{path}' where row = {request['row']}").fetchone()
    assert source == (request["input"],)
    triplets = _table(trained, 1, "adapt", "triplets", TRIPLETS).to_pylist()
    triplet = triplets[row["row"]]
    spans = {s["span_id"]: s for s in _table(trained, 1, "collect", "spans", SPANS).to_pylist()}
    span = spans[triplet["span_id"]]
    assert span["prompt_token_ids"] == triplet["prompt_ids"] == row["prompt_ids"]
    assert span["response_token_ids"] == triplet["response_ids"] == row["response_ids"]
    update = _table(trained, 1, "update", "update_rows", UPDATE_ROWS).to_pylist()[row["row"]]
    assert update["row"] == row["row"]
    assert len(update["advantages"]) == len(row["response_ids"]) == sum(row["response_mask"])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_log_probs_agree_with_what_verl_computes(engine, tmp_path, temperature: float):
    config = small_run(engine.url, str(tmp_path), run_id=f"t{int(temperature * 10)}")
    verl = config.algorithm.config | {
        "actor_rollout_ref.rollout.temperature": temperature,
        "trainer.val_before_train": False,
    }
    ledger = train(
        config.model_copy(
            update={"algorithm": config.algorithm.model_copy(update={"config": verl})}
        )
    )
    for iteration in range(2):
        rows = _table(ledger, iteration, "adapt", "batch", BATCH_ROWS)
        update = _table(ledger, iteration, "update", "update_rows", UPDATE_ROWS)
        assert update["row"].to_pylist() == rows["row"].to_pylist()
        sampled = rows["rollout_logprobs"].combine_chunks().flatten().to_numpy()
        recomputed = update["old_log_probs"].combine_chunks().flatten().to_numpy()
        assert np.abs(sampled - recomputed).max() < 1e-3


def test_a_finished_run_is_found_and_nothing_is_repeated(trained: RunLedger, engine):
    config = trained.record().config
    before, calls = trained.storage.list(trained.prefix), engine.metrics()["requests_total"]
    assert len(train(config).manifests()) == 2
    assert trained.storage.list(trained.prefix) == before
    asked = engine.metrics()["requests_total"] - calls
    assert asked <= 2 * len(CONVERSATIONS) + 2, (
        "of the preflight: two for sampling defaults, the others where need be at two temperatures"
    )


def test_a_changed_configuration_is_refused_and_the_difference_named(trained: RunLedger):
    config = trained.record().config.model_copy(update={"seed": 2})
    with pytest.raises(ConfigError, match=r"run 'trained' exists .* config.seed was 1, now 2"):
        train(config)


async def test_the_server_shows_the_runs_and_their_reports(trained: RunLedger):
    names = ["trained", "trained-000000", "trained-000001"]
    async with get_client() as client:
        found = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"name": {"any_": names}})
        )
        completed = {run.name for run in found if run.state and run.state.is_completed()}
        assert completed == set(names)
        reports = await client.read_artifacts(
            artifact_filter=ArtifactFilter.model_validate({"key": {"any_": ["trained-iterations"]}})
        )
    text = next(
        str(report.data) for report in reports if "trained, iteration 1" in str(report.data)
    )
    manifest = trained.manifest(1)
    assert manifest.content_digest in text
    assert f"| {manifest.coverage.expected} | {manifest.coverage.trained} |" in text


async def test_the_logs_of_run_iteration_and_shard_say_what_was_done(trained: RunLedger):
    expected = {
        "trained": "iteration 1: reward",
        "trained-000001": "stage=update done in",
        "trained-000001-train-0001": "flushed 16 of 16 rollouts: 16 succeeded",
    }
    async with get_client() as client:
        runs = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"name": {"any_": list(expected)}})
        )
        deadline = time.monotonic() + 30  # Prefect's client sends logs every 2 s
        for name, line in expected.items():
            ids = [str(run.id) for run in runs if run.name == name]
            lines = ""
            while line not in lines:
                assert time.monotonic() < deadline, f"{name}: {lines}"
                await asyncio.sleep(0.2)
                logs = await client.read_logs(
                    LogFilter.model_validate({"flow_run_id": {"any_": ids}})
                )
                lines = "\n".join(log.message for log in logs)


def test_failures_keep_their_kind_and_are_never_a_reward(engine, tmp_path):
    failures = {"timeout": {"delay_seconds": 0}, "min_success_fraction": 0.25}
    config = small_run(
        engine.url,
        str(tmp_path),
        run_id="failing",
        agent="tests.agents:fails_by_sample",
        val_data=None,
        rollout=RolloutSettings(timeout_seconds=3.0),
        failures=failures,
    )
    with pytest.raises(TrainerError, match=r"no row reaches the loss; .*'failed': 12"):
        train(config)
    ledger = open_run(config.ledger, config.run_id)
    assert ledger.committed() == 0
    adapted = ledger.iteration(0).finished("adapt").values
    assert adapted["coverage"]["reasons"] == {
        "agent_error": 4,
        "timeout": 4,
        "no_reward": 4,
        "group_too_small": 4,  # one is left in each group: nothing to compare with
    }
    rewards = ledger.iteration(0).finished("collect").values["rewards"]
    assert (rewards["expected"], rewards["rewarded"], rewards["mean_reward"]) == (16, 4, 1.0)
    outcomes = _table(ledger, 0, "collect", "outcomes", OUTCOMES)
    assert len(outcomes) == 20, "timeouts are tried twice, and both tries are kept"
    failed = outcomes.filter(pc.equal(outcomes["kind"], "agent_error")).to_pylist()[0]
    assert failed["reward"] is None
    assert failed["message"].startswith("ValueError: the agent gave up (")
    assert "in fails_by_sample" in failed["traceback"]


def test_a_partly_failed_group_trains_on_what_is_left(engine, tmp_path):
    config = small_run(
        engine.url,
        str(tmp_path),
        run_id="partly",
        agent="tests.agents:fails_on_last_sample",
        val_data=None,
    )
    config.algorithm.config["trainer.total_training_steps"] = 1
    (manifest,) = train(config).manifests()
    assert manifest.coverage.trained == 12
    assert manifest.coverage.reasons == {"agent_error": 4}
    assert manifest.rewards.failures == {"agent_error": 4}
    assert manifest.cost.failed_attempts == 4
    assert manifest.cost.failed_attempt_tokens > 0
    assert manifest.validation == {}


def test_an_iteration_stops_instead_of_training_on_what_a_broken_agent_leaves(engine, tmp_path):
    config = small_run(
        engine.url,
        str(tmp_path),
        run_id="stopped",
        agent="tests.agents:fails_mostly",
        val_data=None,
    )
    sentence = r"fewer than failures.min_success_fraction = 0.5 can succeed; \d+ of 16 failed"
    with pytest.raises(IterationStopped, match=sentence):
        train(config)
    ledger = open_run(config.ledger, config.run_id)
    iteration = ledger.iteration(0)
    assert iteration.record("rollout") is None, "the next start may run what failed again"
    assert iteration.record("collect") is None
    rollouts = RolloutSet(iteration, "train")
    assert 9 <= len(rollouts.unfinished(include_failed=True)) <= 16
    # What is too much may be changed within a run, what is trained may not.
    other = config.failures.model_copy(update={"min_success_fraction": 0.0})
    with pytest.raises(TrainerError, match="no row reaches the loss"):
        train(config.model_copy(update={"failures": other}))


def test_a_missing_reward_is_zero_where_the_user_wrote_it(engine, tmp_path):
    config = small_run(
        engine.url,
        str(tmp_path),
        run_id="zeros",
        agent="tests.agents:gives_no_reward_on_last_sample",
        val_data=None,
        failures={"no_reward": {"then": "zero"}},
    )
    config.algorithm.config["trainer.total_training_steps"] = 1
    (manifest,) = train(config).manifests()
    assert manifest.coverage.trained == 16
    assert manifest.coverage.failed == 0
    assert manifest.coverage.rewards_by_policy == 4
    assert manifest.rewards.failures == {"no_reward": 4}
    assert manifest.rewards.attempts == {"succeeded": 12, "no_reward": 4}
    assert manifest.rewards.mean_reward == 1.0, "over the rollouts that gave one"
    ledger = open_run(config.ledger, config.run_id)
    outcomes = _table(ledger, 0, "collect", "outcomes", OUTCOMES)
    missing = outcomes.filter(pc.equal(outcomes["kind"], "no_reward"))
    assert missing["reward"].null_count == len(missing) == 4
    rows = _table(ledger, 0, "adapt", "batch", BATCH_ROWS)
    zero = rows.filter(pc.is_in(rows["index"], value_set=missing["index"].combine_chunks()))
    assert pc.unique(zero["reward"]).to_pylist() == [0.0]
    assert verify_run(ledger) == []


def test_an_iteration_without_a_row_may_be_skipped(engine, tmp_path):
    config = small_run(
        engine.url,
        str(tmp_path),
        run_id="skipped",
        agent="tests.agents:gives_no_reward_on_last_sample",
    )
    filters = {
        "agentlightning.filter.equal_rewards": True,
        "agentlightning.filter.on_empty": "skip",
        "trainer.val_before_train": False,
    }
    algorithm = config.algorithm.model_copy(update={"config": config.algorithm.config | filters})
    ledger = train(config.model_copy(update={"algorithm": algorithm}))
    first, second = ledger.manifests()
    for manifest in (first, second):
        assert manifest.policy_out is None
        assert manifest.state["skipped"] is True
        assert manifest.coverage.reasons == {"equal_rewards": 12, "no_reward": 4}
        assert manifest.validation == {}
        assert manifest.update == {}
    assert first.policy_in == second.policy_in
    assert (first.state["step"], second.state["step"]) == (1, 2)
    assert verify_run(ledger) == []


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_whole_trajectories_are_trained_on(engine, tmp_path, estimator: str):
    config = small_run(engine.url, str(tmp_path), run_id="trajectories", val_data=None)
    settings = config.algorithm.config | {
        "agentlightning.trace_aggregator.level": "trajectory",
        "agentlightning.trace_aggregator.trajectory_max_response_length": 96,
        "algorithm.adv_estimator": estimator,
        "trainer.total_training_steps": 1,
    }
    if estimator == "gae":
        settings |= {"critic.ppo_mini_batch_size": 4, "critic.ppo_micro_batch_size_per_gpu": 16}
    algorithm = config.algorithm.model_copy(update={"config": settings})
    ledger = train(config.model_copy(update={"algorithm": algorithm}))
    (manifest,) = ledger.manifests()
    assert manifest.policy_out is not None
    assert manifest.policy_out.weights_digest != manifest.policy_in.weights_digest
    assert ("critic/vf_loss" in manifest.update) == (estimator == "gae")

    triplets = _table(ledger, 0, "adapt", "triplets", TRIPLETS)
    batch = _table(ledger, 0, "adapt", "batch", BATCH_ROWS)
    calls_of = {
        index: [call for call in triplets.to_pylist() if call["index"] == index]
        for index in set(triplets["index"].to_pylist())
    }
    joined = [row for row in batch.to_pylist() if row["num_calls"] > 1]
    assert joined, "some rollout called the tool"
    for row in joined:
        calls = calls_of[row["index"]][row["step"] :][: row["num_calls"]]
        last = calls[-1]
        assert row["prompt_ids"] + row["response_ids"] == last["prompt_ids"] + last["response_ids"]
        assert sum(row["response_mask"]) == sum(len(call["response_ids"]) for call in calls)
    breaks = sum(manifest.breaks.values())
    assert len(batch) == len(calls_of) + breaks
    assert sum(batch["num_calls"].to_pylist()) == len(triplets) == manifest.cost.model_calls
    assert manifest.tokens is not None
    assert manifest.tokens.sampled == manifest.cost.completion_tokens
    assert manifest.coverage.expected == 16 == manifest.coverage.trained
    assert verify_run(ledger) == []


def test_a_run_over_two_engines_has_the_rows_of_a_run_over_one(
    trained: RunLedger, engine, tmp_path
):
    base = trained.record().base.policy
    with ModelServer.start(ServingSettings(), base, tmp_path / "second") as second:
        before = engine.metrics()["requests_total"]
        config = small_run(engine.url, str(tmp_path / "ledger"), run_id="two-engines")
        serving = ServingSettings(url=(engine.url, second.url))
        ledger = train(config.model_copy(update={"serving": serving}))
        answered = [engine.metrics()["requests_total"] - before, second.metrics()["requests_total"]]
    asked = sum(manifest.cost.model_calls for manifest in ledger.manifests())
    assert all(number > asked / 8 for number in answered), "both share the load"
    sampled = ["index", "call_index", "prompt_ids", "response_ids", "reward"]
    for iteration in range(2):
        one, two = (
            _table(run, iteration, "adapt", "triplets", TRIPLETS).select(sampled)
            for run in (trained, ledger)
        )
        assert one.to_pylist() == two.to_pylist()
    assert verify_run(ledger) == []


def test_a_failure_may_drop_its_group(engine, tmp_path):
    config = small_run(
        engine.url,
        str(tmp_path),
        run_id="groups",
        agent="tests.agents:fails_in_even_rows",
        val_data=None,
        failures={"agent_error": {"then": "drop_group"}},
    )
    ledger = train(config)
    reasons = [manifest.coverage.reasons for manifest in ledger.manifests()]
    for number, found in enumerate(reasons):
        rows = _table(ledger, number, "adapt", "batch", BATCH_ROWS)
        dropped = rows.filter(pc.equal(rows["drop_reason"], "group_failed"))
        assert len(pc.unique(dropped["index"])) == found.get("group_failed", 0)
        assert found.get("group_failed", 0) == 3 * found.get("agent_error", 0)
    assert sum(found.get("agent_error", 0) for found in reasons) > 0
    assert verify_run(ledger) == []


def _table(ledger: RunLedger, iteration: int, stage: str, name: str, schema):
    file = ledger.iteration(iteration).finished(stage).file(name)
    return files.read_table(ledger.storage, file, schema)
