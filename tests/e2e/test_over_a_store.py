"""The calculator's agent trained over a store, without Prefect: the pipeline's stages, rows and
ledger, and a run that is killed goes on.
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from agl_core.algorithm import VERL, Baseline
from agl_core.config import RunConfig
from agl_core.dataset import read_jsonl
from agl_core.errors import ConfigError
from agl_core.ledger import files
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.tables import BATCH_ROWS, OUTCOMES, TRIPLETS
from agl_core.ledger.verify import verify_run
from agl_core.llm_proxy import LLMProxy
from agl_core.serving.launch import ModelServer
from agl_core.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from examples.calculator.agent import calculator
from tests.agl_core.algorithm.runners import running
from tests.conftest import CALCULATOR, small_run
from tests.e2e.killable_run import KillableRun, kill_before_writing

POLICY = str((CALCULATOR / "policy").resolve())
pytestmark = pytest.mark.slow

SAMPLED = ["index", "group", "call_index", "prompt_ids", "response_ids", "reward", "rewards"]
ROWS = ["index", "group", "prompt_ids", "response_ids", "response_mask", "token_rewards", "reward"]
# Before the second flush of iteration 0, within its update, and before its last record.
DEATHS = [r"/000000/rollouts/train/chunks/0001-0002.outcomes", r"/update/a1/checkpoint/optim"]


def rows_of(uri: str) -> list[Any]:
    return [json.loads(row) for row in read_jsonl(uri)]


async def train_over(store: LightningStore, config: RunConfig, run: dict[str, Any]) -> Any:
    algorithm = VERL(config.algorithm.config | {"data.seed": config.seed}, run=run)
    algorithm.set_store(store)
    async with running(store, calculator, concurrency=4):
        return await algorithm.run(rows_of(config.train_data), rows_of(config.val_data or ""))


def settings(config: RunConfig, **changed: Any) -> dict[str, Any]:
    return {
        "run_id": config.run_id,
        "ledger": config.ledger,
        "serving": {"url": config.serving.url},
        "rollout": {"timeout_seconds": config.rollout.timeout_seconds, "flush_seconds": 0.05},
        **changed,
    }


def child(config_json: str, store: str, log: str, dies_at: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if dies_at:
        kill_before_writing(dies_at)
    config = RunConfig.model_validate_json(config_json)
    asyncio.run(train_over(SqliteLightningStore(store), config, settings(config)))


def start(config: RunConfig, folder: Path, dies_at: str = "") -> int:
    """Train in a process of its own; return its exit status."""
    arguments = (config.model_dump_json(), str(folder / "store.db"), str(folder / "log"), dies_at)
    process = KillableRun.context.Process(target=child, args=arguments)
    process.start()
    process.join(200)
    assert process.exitcode is not None, "still runs"
    return process.exitcode


def table(
    ledger: RunLedger, iteration: int, stage: str, name: str, schema: pa.Schema, columns: list[str]
) -> list[dict[str, Any]]:
    found = ledger.iteration(iteration)
    file = found.finished(stage).file(name)
    return files.read_table(found.storage, file, schema, columns).to_pylist()


@pytest.fixture
def config(engine: ModelServer, tmp_path: Path) -> RunConfig:
    return small_run(engine.url, str(tmp_path / "ledger"))


def test_both_drivers_make_the_same_rows_and_a_killed_run_goes_on(
    trained: RunLedger, config: RunConfig, tmp_path: Path
):
    ledger = open_run(config.ledger, config.run_id)
    kept: dict[str, bytes] = {}
    for dies_at in DEATHS:
        assert start(config, tmp_path, dies_at) == -signal.SIGKILL, (tmp_path / "log").read_text()
        now = {
            key: ledger.storage.read(key)
            for key in ledger.storage.list(ledger.prefix)
            if not key.endswith(".alive.json")
        }
        assert kept.items() <= now.items(), "what was written has changed"
        kept = now
        if dies_at is DEATHS[0]:
            finished = RolloutSet(ledger.iteration(0), "train").outcomes()["attempt_id"].to_pylist()
    assert start(config, tmp_path) == 0, (tmp_path / "log").read_text()

    assert verify_run(ledger) == []
    own, theirs = ledger.manifests(), trained.manifests()
    assert len(own) == len(theirs) == 2
    for left, right in zip(own, theirs, strict=True):
        assert (left.coverage, left.rows, left.rewards) == (
            right.coverage,
            right.rows,
            right.rewards,
        )
        assert left.validation == right.validation
    for iteration in range(2):
        for name, schema, columns in (("triplets", TRIPLETS, SAMPLED), ("batch", BATCH_ROWS, ROWS)):
            found = table(ledger, iteration, "adapt", name, schema, columns)
            assert found == table(trained, iteration, "adapt", name, schema, columns)
    collected = table(ledger, 0, "collect", "outcomes", OUTCOMES, ["attempt_id", "final"])
    final = {row["attempt_id"] for row in collected if row["final"]}
    assert finished, "a flush came before the kill"
    assert set(finished) <= final, "a finished rollout was run again"
    left = asyncio.run(unfinished(tmp_path / "store.db"))
    assert left == [], "rollouts of killed processes are still to be run"


async def unfinished(path: Path) -> list[str]:
    store = SqliteLightningStore(path)
    living = await store.query_rollouts(status_in=["queuing", "requeuing", "preparing", "running"])
    await store.close()
    return [rollout.rollout_id for rollout in living]


async def test_a_run_starts_its_own_engine_uses_the_given_proxy_and_is_found_complete(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = {"actor_rollout_ref.model.path": POLICY}
    verl = config.algorithm.config | model | {"trainer.total_training_steps": 1}
    inputs = rows_of(config.train_data)
    monkeypatch.chdir(tmp_path)
    store = InMemoryLightningStore()
    algorithm, proxy = VERL(verl), LLMProxy()
    algorithm.set_store(store)
    algorithm.set_llm_proxy(proxy)
    async with running(store, calculator, runners=2, concurrency=4):
        result = await algorithm.run(inputs)
    assert algorithm.result is result
    assert (result.ledger, len(result.manifests)) == (str(tmp_path / ".agl" / "ledger"), 1)
    assert result.manifests[0].coverage.trained == result.manifests[0].coverage.expected == 16
    assert result.manifests[0].validation == {}
    assert not proxy.is_running()
    again = VERL(verl, run={"run_id": result.run_id})
    again.set_store(store)
    assert await again.run(inputs) == result, "nothing is left to do, so no runner is needed"
    again = VERL(verl | {"actor_rollout_ref.actor.optim.lr": 1e-4}, run={"run_id": result.run_id})
    again.set_store(store)
    with pytest.raises(ConfigError, match=r"optim\.lr was 0\.001, now 0\.0001"):
        await again.run(inputs)


async def test_a_baseline_scores_the_agent_on_a_served_model(engine: ModelServer):
    policy = f"{engine.url}/v1"
    name = engine_policy(engine)
    store = InMemoryLightningStore()
    model = {"model": f"openai/{name}", "api_base": policy}
    proxy = LLMProxy(model_list=[{"model_name": name, "litellm_params": model}], store=store)
    await proxy.start()
    baseline = Baseline(polling_interval=0.5, max_queue_length=8)
    baseline.set_store(store)
    baseline.set_llm_proxy(proxy)
    sampling = {"temperature": 1.0, "max_tokens": 16}
    baseline.set_initial_resources({"main_llm": proxy.as_resource(sampling_parameters=sampling)})
    async with running(store, calculator):
        await baseline.run(rows_of("examples/calculator/data/train.jsonl")[:12])
    await proxy.stop()
    summary = baseline.summary["train"]
    assert summary.ends == {"succeeded": 12}
    assert len(summary.rewards) == 12
    assert summary.problems == {}


def engine_policy(engine: ModelServer) -> str:
    from agl_core.serving.launch import ask_server

    return ask_server("GET", f"{engine.url}/policy")["version"]
