"""The algorithm over states: proposals, learning, export, resuming."""

import asyncio
import hashlib
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.numpy import load_file

from agl_core.algorithm.iterative import Experience
from agl_core.algorithm.verl.algorithm import VERL, VERLState
from agl_core.algorithm.verl.order import rows_of_step
from agl_core.errors import ConfigError, TrainerError
from agl_core.ledger.tables import UPDATE_METRICS, UPDATE_ROWS
from agl_core.types.training import PolicyRef
from tests.agl_core.algorithm.verl.conftest import (
    SETTINGS,
    UNEVEN,
    LocalArtifacts,
    make_rows,
    normalise,
)
from tests.agl_core.algorithm.verl.test_checkpoint import Bomb

ACTOR = "actor_rollout_ref.actor."
BASE = PolicyRef(version="v000000", weights_digest="sha256:0", path="unused")


def algorithm(**settings: object) -> VERL:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return VERL(normalise(SETTINGS) | named)


def start(verl: VERL, *, train: int = 10, val: int | None = None) -> VERLState:
    return verl.start(BASE, range(train), None if val is None else range(val))


def tensors_digest(folder: Path) -> str:
    """Stands in for `weights_digest`; over tensors, not files."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(f"{name}{tensor.dtype}{tensor.shape}".encode() + tensor.tobytes())
    return f"sha256:{digest.hexdigest()}"


@pytest.fixture(autouse=True)
def _digest(monkeypatch):
    """Uses the real digest where the module exists."""
    try:
        import agl_core.serving.weights  # noqa: F401
    except ModuleNotFoundError:
        import sys
        from types import SimpleNamespace

        module = SimpleNamespace(weights_digest=tensors_digest)
        monkeypatch.setitem(sys.modules, "agl_core.serving.weights", module)


def digest_of(folder: Path) -> str:
    from agl_core.serving.weights import weights_digest

    return weights_digest(folder)


def experience(artifacts: LocalArtifacts, table: pa.Table | None = None) -> Experience:
    return Experience(lambda: make_rows(UNEVEN) if table is None else table, artifacts)


@pytest.fixture
def artifacts(tmp_path: Path) -> LocalArtifacts:
    return LocalArtifacts(tmp_path / "kept")


@pytest.fixture
def policy_start(tiny_policy: Path):
    def make(verl: VERL) -> VERLState:
        base = PolicyRef(version="v000000", weights_digest="sha256:0", path=str(tiny_policy))
        return verl.start(base, range(10), None)

    return make


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (7, 7), (5, 4), (9, 2), (12, 3)])
@pytest.mark.parametrize("seed", [None, 3])
def test_no_row_comes_twice_in_a_batch_or_an_epoch(size: int, batch: int, seed: int | None):
    rows = []
    for step in range(30):
        taken = rows_of_step(step, size=size, batch_size=batch, seed=seed)
        assert len(set(taken)) == batch
        rows += taken
    for epoch in range(len(rows) // size):
        assert sorted(rows[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_have_different_seeded_orders():
    def epoch(number: int, seed: int) -> list[int]:
        return rows_of_step(number, size=20, batch_size=20, seed=seed)

    assert epoch(0, 1) == epoch(0, 1)
    assert len({tuple(epoch(k, s)) for k in (0, 1) for s in (1, 2)}) == 4


def test_a_proposal_follows_from_the_state_alone():
    verl = algorithm()
    state = start(verl)
    proposal = verl.propose(state)
    assert proposal == algorithm().propose(VERLState.model_validate_json(state.model_dump_json()))
    assert proposal.policy == BASE
    assert proposal.sampling_parameters == {"temperature": 1.0, "max_tokens": 32}
    assert [(r.group, r.sample) for r in proposal.requests] == [
        (group, sample) for group in range(4) for sample in range(2)
    ]
    assert {r.mode for r in proposal.requests} == {"train"}
    later = verl.propose(state.model_copy(update={"step": 1}))
    assert not {r.row for r in later.requests} & {r.row for r in proposal.requests}


def test_without_shuffle_rows_keep_their_order():
    verl = algorithm(data__shuffle=False)
    rows = [request.row for request in verl.propose(start(verl)).requests]
    assert rows == [0, 0, 1, 1, 2, 2, 3, 3]


def test_validation_takes_some_rows_as_verl_does():
    first = algorithm(data__val_max_samples=3, data__shuffle=False)
    chosen = algorithm(data__val_max_samples=3)
    rows = [[r.row for r in a.validation(start(a, val=64)).requests] for a in (first, chosen)]
    assert rows == [[0, 1, 2], np.random.default_rng(7).choice(64, 3, replace=False).tolist()]


def test_the_seed_is_the_runs_and_its_default_where_none_is_given():
    settings = {key: value for key, value in normalise(SETTINGS).items() if key != "data.seed"}
    assert start(VERL(settings)).seed == VERL(settings).seed == 1
    assert start(VERL(settings, run={"seed": 5})).seed == 5
    assert start(VERL(settings | {"data.seed": 0})).seed == 0
    with pytest.raises(ConfigError, match=r"data.seed is 7 and the run's seed is 5"):
        VERL(SETTINGS, run={"seed": 5})


def test_item_6_validation_takes_its_own_sampling_settings():
    key = "actor_rollout_ref__rollout__val_kwargs__"
    verl = algorithm(**{key + "n": 2, key + "temperature": 0.6}, data__val_batch_size=2)
    proposal = verl.validation(start(verl, val=5))
    assert proposal is not None
    assert [(r.row, r.sample) for r in proposal.requests] == [
        (row, sample) for row in range(5) for sample in range(2)
    ]
    assert {(r.dataset, r.mode) for r in proposal.requests} == {("val", "val")}
    assert proposal.sampling_parameters["temperature"] == 0
    sampled = algorithm(**{key + "do_sample": True, key + "temperature": 0.6})
    greedy = sampled.validation(start(sampled, val=5))
    assert greedy is not None
    assert greedy.sampling_parameters["temperature"] == 0.6
    assert len(greedy.requests) == 5


def validated(verl: VERL) -> list[int]:
    state = start(verl, val=5)
    steps = [state.model_copy(update={"step": step}) for step in range(5)]
    return [s.step for s in steps if verl.validation(s) is not None]


def test_validation_comes_when_the_trainer_says():
    assert validated(algorithm()) == [0, 1, 2, 3, 4]
    assert validated(algorithm(trainer__val_before_train=False)) == [1, 2, 3, 4]
    assert validated(algorithm(trainer__test_freq=3)) == [0, 3, 4]
    assert validated(algorithm(trainer__test_freq=-1)) == [0]
    verl = algorithm()
    assert verl.validation(start(verl)) is None


def test_a_run_ends_after_its_steps():
    verl = algorithm(trainer__total_training_steps=2)
    state = start(verl)
    steps = [state.model_copy(update={"step": step}) for step in range(3)]
    assert [verl.done(s) for s in steps] == [False, False, True]


def test_a_dataset_smaller_than_a_batch_is_refused():
    with pytest.raises(ConfigError, match="above the 3 rows"):
        start(algorithm(), train=3)


def test_responses_that_no_policy_of_its_size_can_hold_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    base = PolicyRef(version="v000000", weights_digest="sha256:0", path=str(tmp_path))
    for limit, is_right in [(255, True), (256, False)]:
        refused = pytest.raises(ConfigError, match=r"max_response_length=256 .* holds 256 tokens")
        with nullcontext() if is_right else refused:
            algorithm(data__max_response_length=limit).start(base, [{}] * 4, None)


def test_another_model_path_than_the_base_is_refused():
    with pytest.raises(ConfigError, match="is not the policy unused"):
        start(algorithm(actor_rollout_ref__model__path="elsewhere"))


async def test_learning_keeps_checkpoint_tables_and_version(policy_start, artifacts):
    verl = algorithm()
    state = policy_start(verl)
    learned = await verl.learn(state, experience(artifacts))
    assert (learned.step, learned.policy) == (1, state.policy)
    assert learned.checkpoint is not None
    rows, metrics = artifacts.tables["update_rows"], artifacts.tables["update_metrics"]
    assert rows.schema.equals(UPDATE_ROWS, check_metadata=True)
    assert rows["row"].to_pylist() == make_rows(UNEVEN)["row"].to_pylist()
    assert metrics.schema.equals(UPDATE_METRICS, check_metadata=True)
    found = {(m["step"], m["name"]): m["value"] for m in metrics.to_pylist()}
    assert {(0, "actor/pg_loss"), (0, "actor/ppo_kl"), (0, "actor/grad_norm")} < found.keys()
    assert found[(0, "actor/lr")] == 1e-3
    assert found[(None, "actor/entropy")] > 0
    assert found[(None, "training/rollout_log_probs_diff_max")] > 0
    exported = await verl.export(learned, artifacts)
    assert exported.policy.version == "v000001"
    assert exported.policy.folder is not None
    assert exported.policy.weights_digest == digest_of(
        artifacts.root / exported.policy.folder.prefix
    )
    verl.close()


async def test_a_resumed_run_equals_one_that_was_not_interrupted(policy_start, artifacts):
    settings = {ACTOR.replace(".", "__") + "ppo_mini_batch_size": 2}
    verl = algorithm(**settings, **{ACTOR.replace(".", "__") + "shuffle": True})
    state = policy_start(verl)
    learned = await verl.learn(state, experience(artifacts))
    one = await verl.export(learned, artifacts)
    two = await verl.export(await verl.learn(one, experience(artifacts)), artifacts)
    tables = dict(artifacts.tables)
    verl.close()

    # a new process between update and export, and again between two iterations
    other = VERL(verl.overrides)
    again = await other.export(VERLState.model_validate_json(learned.model_dump_json()), artifacts)
    assert again.policy.weights_digest == one.policy.weights_digest
    other.close()
    resumed = VERLState.model_validate_json(again.model_dump_json())
    final = await other.export(await other.learn(resumed, experience(artifacts)), artifacts)
    other.close()
    assert final.policy.weights_digest == two.policy.weights_digest != one.policy.weights_digest
    assert artifacts.tables["update_metrics"].equals(tables["update_metrics"])
    assert artifacts.tables["update_rows"].equals(tables["update_rows"])


async def test_a_worker_built_from_a_fetched_policy_exports_in_a_later_stage(
    policy_start, artifacts, tmp_path, monkeypatch
):
    verl = algorithm()
    one = await verl.export(await verl.learn(policy_start(verl), experience(artifacts)), artifacts)
    verl.close()

    def fetch_for_a_stage(ref):
        return Path(shutil.copytree(artifacts.root / ref.prefix, stage / ref.prefix))

    stage = tmp_path / "update"
    monkeypatch.setattr(artifacts, "fetch_folder", fetch_for_a_stage)
    learned = await verl.learn(one, experience(artifacts))
    shutil.rmtree(stage)
    stage = tmp_path / "export"
    two = await verl.export(learned, artifacts)
    assert two.policy.version == "v000002"
    verl.close()


async def test_code_in_a_checkpoint_with_the_right_hash_is_not_run(
    policy_start, artifacts, tmp_path
):
    verl = algorithm()
    learned = await verl.learn(policy_start(verl), experience(artifacts))
    verl.close()
    assert learned.checkpoint is not None
    files = []
    for ref in learned.checkpoint.files:
        path = artifacts.root / ref.key
        if ref.key.endswith("extra_state_world_size_1_rank_0.pt"):
            torch.save({"rng": Bomb(tmp_path / "exploded"), "lr_scheduler": None}, path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            ref = ref.model_copy(update={"sha256": digest, "size_bytes": path.stat().st_size})
        files.append(ref)
    changed = learned.checkpoint.model_copy(update={"files": tuple(files)})
    other = VERL(verl.overrides)
    with pytest.raises(TrainerError, match="holds more than tensors and numbers"):
        await other.export(learned.model_copy(update={"checkpoint": changed}), artifacts)
    other.close()
    assert not (tmp_path / "exploded").exists()


async def test_a_skipped_iteration_changes_nothing_but_the_step(policy_start, artifacts):
    verl = algorithm(agentlightning__filter__on_empty="skip")
    state = policy_start(verl)
    first = await verl.export(await verl.learn(state, experience(artifacts)), artifacts)
    plain = await verl.export(await verl.learn(first, experience(artifacts)), artifacts)
    again = await verl.export(await verl.learn(state, experience(artifacts)), artifacts)

    skipped = await verl.export(verl.skip(again), artifacts)
    assert (skipped.step, skipped.policy) == (2, again.policy)
    assert skipped.checkpoint == again.checkpoint
    with_data = skipped.model_copy(update={"val_size": 5})
    assert verl.validation(with_data) is None, "no version was made"
    assert verl.propose(skipped).policy == again.policy
    worker = verl._worker
    later = await verl.export(await verl.learn(skipped, experience(artifacts)), artifacts)
    assert verl._worker is worker, "it holds the weights, so nothing is built again"
    assert later.policy.version == "v000003"
    assert later.policy.weights_digest == plain.policy.weights_digest
    verl.close()


async def test_a_batch_without_weight_is_skipped_where_that_is_asked_for(policy_start, artifacts):
    masked = make_rows(UNEVEN, masked=True)
    verl = algorithm()
    with pytest.raises(TrainerError, match=r"no_weight.*on_empty=skip goes on"):
        await verl.learn(policy_start(verl), experience(artifacts, masked))
    verl.close()
    verl = algorithm(agentlightning__filter__on_empty="skip")
    state = policy_start(verl)
    after = await verl.export(await verl.learn(state, experience(artifacts, masked)), artifacts)
    assert after == state.model_copy(update={"step": 1, "skipped": True})
    assert set(artifacts.tables["update_rows"]["drop_reason"].to_pylist()) == {"no_weight"}
    verl.close()


async def test_a_failed_update_leaves_the_state_good_to_try_again(
    policy_start, artifacts, monkeypatch
):
    verl = algorithm()
    state = policy_start(verl)
    put_folder = artifacts.put_folder

    def failing(name: str, folder: Path):
        raise TrainerError("the store is gone")

    monkeypatch.setattr(artifacts, "put_folder", failing)
    with pytest.raises(TrainerError, match="store is gone"):
        await verl.learn(state, experience(artifacts))
    first = artifacts.tables.copy()
    monkeypatch.setattr(artifacts, "put_folder", put_folder)
    await verl.learn(state, experience(artifacts))
    assert not first
    values = artifacts.tables["update_rows"]["old_log_probs"]
    untouched = algorithm()
    await untouched.learn(state, experience(artifacts))
    assert artifacts.tables["update_rows"]["old_log_probs"].equals(values)
    verl.close()
    untouched.close()


async def test_learning_rate_zero_keeps_the_weights(policy_start, artifacts, tiny_policy):
    verl = VERL(normalise(SETTINGS) | {ACTOR + "optim.lr": 0.0})
    learned = await verl.learn(policy_start(verl), experience(artifacts))
    exported = await verl.export(learned, artifacts)
    verl.close()
    assert exported.policy.weights_digest == digest_of(tiny_policy)


async def test_the_event_loop_stays_free_while_learning(policy_start, artifacts):
    verl = algorithm()
    learning = asyncio.create_task(verl.learn(policy_start(verl), experience(artifacts)))
    turns = 0
    while not learning.done():
        await asyncio.sleep(0.005)
        turns += 1
    await learning
    verl.close()
    assert turns > 5


async def test_a_batch_that_cannot_be_learned_from_is_an_error(policy_start, artifacts):
    verl = algorithm()
    with pytest.raises(TrainerError, match="one rollout"):
        await verl.learn(policy_start(verl), experience(artifacts, make_rows(UNEVEN[:2])))
    verl.close()


def test_closing_an_unused_algorithm_does_nothing():
    algorithm().close()
