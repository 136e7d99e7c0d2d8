"""Two shards on a real process pool whose processes die, and a retry from the UI: who runs again is
counted at the model server.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agl_core.config import RunConfig
from agl_core.ledger.run import open_run
from agl_core.llm_proxy.capture import call_seed
from tests.chaos.agents import PLAN, Plan
from tests.chaos.checker import check_run
from tests.chaos.model_server import ALWAYS, DeterministicEngine
from tests.chaos.process import in_thread, run_here
from tests.chaos.runs import chaos_config, chosen, requests
from tests.chaos.servers import MortalPool
from tests.e2e.deployed import Api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that says how agents are ill; the worker's children read it too."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAN, str(path))
        yield path


@pytest.fixture(scope="module")
def pool(
    prefect_api: str, plan: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MortalPool]:
    found = MortalPool(tmp_path_factory.mktemp("pool"))
    found.deploy()
    found.start_worker()
    yield found
    found.close()


@pytest.fixture
def api(prefect_api: str) -> Iterator[Api]:
    with Api(prefect_api) as client:
        yield client


def two_shards(engine: DeterministicEngine, ledger: Path, run_id: str, **rest: Any) -> RunConfig:
    settings = {
        "deployment": "rollout-shard/rollout-shard",
        "shard_size": 8,
        "concurrency": 4,
        "timeout_seconds": 20.0,
        "flush_rollouts": 1,
    }
    return chaos_config(
        engine.url, str(ledger), run_id, iterations=1, val_data=None, rollout=settings, **rest
    )


def calls_of(engine: DeterministicEngine, ledger: Path, run_id: str) -> dict[int, int]:
    """Return how often the first call of each training rollout came to the model server."""
    return {
        row["index"]: engine.seeds[call_seed(row["seed"], 0)] for row in requests(ledger, run_id)
    }


def stored_ends(ledger: Path, run_id: str) -> dict[int, str]:
    """Return how the rollouts ended that the shards have stored."""
    folder = ledger / "runs" / run_id / "iterations/000000/rollouts/train/chunks"
    rows = [
        row
        for path in folder.glob("*.outcomes.parquet")
        for row in pq.read_table(path).to_pylist()
        if row["final"]
    ]
    return {row["index"]: row["kind"] for row in rows}


def wait_for(condition: Any, what: str, seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


@pytest.mark.long
def test_an_iteration_completes_though_an_engine_and_the_worker_are_killed(
    deterministic: DeterministicEngine, tmp_path: Path, pool: MortalPool, api: Api
):
    config = two_shards(deterministic, tmp_path, "mortal")
    before = deterministic.calls.total()
    deterministic.delay_seconds = 1.0  # so that some are stored, and some under way
    killed: list[int] = []

    def strike() -> None:
        """An engine once its shard has stored something, then the worker with what it runs."""
        claims = tmp_path / "runs/mortal/iterations/000000/rollouts/train"
        wait_for(lambda: list(claims.glob("chunks/*.outcomes.parquet")), "no chunk")
        killed.append(pool.kill_shard())
        wait_for(lambda: len(list(claims.glob("claims/*"))) >= 3, "the shard is not replaced")
        killed.append(pool.kill_worker())
        pool.start_worker()
        deterministic.delay_seconds = 0.0

    with in_thread(strike):
        error = run_here(config)
    assert error is None
    assert killed[0] == 1
    assert killed[1] >= 1
    assert check_run(tmp_path, "mortal") == []
    (manifest,) = open_run(str(tmp_path), "mortal").manifests()
    assert manifest.coverage.trained == 16
    assert deterministic.calls.total() > before

    shards = {
        run["name"]: run["state_type"]
        for run in api.of_run("flow_runs", "mortal")
        if "-train-" in run["name"]
    }
    assert len(shards) >= 3, "two shards, and those that replaced the dead"
    assert "CRASHED" in shards.values(), shards
    assert "COMPLETED" in shards.values(), shards


def test_a_retry_in_the_ui_runs_the_failed_rollouts_and_no_other(
    deterministic: DeterministicEngine, tmp_path: Path, plan: Path, pool: MortalPool, api: Api
):
    """The run's own flow run is retried; its agents are well by then."""
    ill = Plan(("raises",), seed=4, share=0.3, times=ALWAYS)
    ill.write(plan)
    # Stops at the third failure, when others have ended well; `fail` would stop at the first.
    policy = {"attempts": 1, "max_fraction": 0.13}
    config = two_shards(deterministic, tmp_path, "retried", failures={"agent_error": policy})
    run_id = api.start("training-run/training-run", {"config": config.model_dump(mode="json")})
    try:
        run = api.ended(run_id, timeout_seconds=400)
    finally:
        plan.unlink()
    assert run["state_type"] == "FAILED"
    assert "agent_error" in run["state"]["message"], run["state"]["message"]
    ends = stored_ends(tmp_path, "retried")
    succeeded = {index for index, kind in ends.items() if kind == "succeeded"}
    failed = {index for index, kind in ends.items() if kind == "agent_error"}
    assert succeeded
    assert failed
    assert failed <= chosen(tmp_path, "retried", 0, ill).keys()
    ran = calls_of(deterministic, tmp_path, "retried")

    api.post(
        f"/flow_runs/{run_id}/set_state",
        state={"type": "SCHEDULED", "name": "AwaitingRetry"},
        force=False,
    )
    wait_for(lambda: api.get(f"/flow_runs/{run_id}")["state_type"] != "FAILED", "not retried")
    run = api.ended(run_id, timeout_seconds=400)
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    again = calls_of(deterministic, tmp_path, "retried")
    ran_again = {index for index in ran if again[index] > ran[index]}
    assert ran_again == set(range(16)) - succeeded
    assert failed <= ran_again
    assert check_run(tmp_path, "retried", retries_failed=True) == []
    (manifest,) = open_run(str(tmp_path), "retried").manifests()
    assert manifest.coverage.trained == 16
