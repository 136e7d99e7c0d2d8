"""`agl check`: one row a check, the sentence of the one that fails, and no run begun."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from agl_core.config import RunConfig
from agl_core.errors import LedgerError
from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.serving.launch import ModelServer
from deployments.cli import app
from tests.conftest import CALCULATOR, small_run
from tests.e2e.deployed import Api


def write(folder: Path, engine_url: str, **changes: object) -> Path:
    settings = {"run_id": "checked", "preflight": {"canary": True}, "val_data": None}
    config = small_run(engine_url, str(folder / "ledger"), **settings)
    config = RunConfig.model_validate(config.model_dump() | changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return path


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def rows(done: Result) -> dict[str, str]:
    """Results by check."""
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("│"):
            name, result = (cell.strip() for cell in line.split("│")[1:3])
            if name:
                found[name] = result
            else:
                found[list(found)[-1]] += f" {result}"
    return found


def test_a_run_that_can_start_passes_every_check_and_is_not_begun(
    engine: ModelServer, prefect_api: str, tmp_path: Path
):
    done = check(str(write(tmp_path, engine.url)))
    assert done.exit_code == 0, done.stdout
    found = rows(done)
    assert set(found.values()) == {"ok"}
    assert {"work pool starts shards", "run is the one in the ledger"}.isdisjoint(found)
    assert list(found)[-1] == "one rollout succeeds"
    runs = sorted(path.name for path in (tmp_path / "ledger/runs").iterdir())
    assert [name.rpartition("-")[0].rpartition("-")[0] for name in runs] == ["check"]
    run = open_run(str(tmp_path / "ledger"), runs[0])
    assert run.record().datasets == {}
    assert verify_run(run) == []
    with pytest.raises(LedgerError):
        run.iteration(0).finished("propose")


def test_it_takes_what_a_run_is_started_with(engine: ModelServer, tmp_path: Path):
    file = str(write(tmp_path, engine.url))
    batch = "data.train_batch_size=3"
    model = str(CALCULATOR / "policy")
    done = check(file, batch, "--run-id", "other", "--model", model, "--no-canary")
    assert done.exit_code == 0, done.stdout
    started = f"agl run {file} {batch} --run-id other --model {model}"
    assert f"Run other can start: {started}" in done.stdout
    for given, failing, message in [
        (["actor_rollout_ref.rollout.n=1"], "settings of the algorithm are honoured", "n=1: grpo"),
        (["--model", "no/folder"], "model is there and fits the data", "folder no/folder does not"),
        (["data.train_batch_size=1000000"], "model is there and fits the data", "above the"),
    ]:
        done = check(file, *given, "--no-canary")
        found = rows(done)
        assert (done.exit_code, list(found)[-1]) == (2, failing)
        assert message in found[failing]


def test_what_is_cheap_is_checked_before_the_server_and_the_pool(
    engine: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    changes = {"rollout": {"deployment": "rollout-shard/none"}}
    found = rows(check(str(write(tmp_path, engine.url, **changes, agent="nothing:x"))))
    assert list(found)[-1] == "agent can be imported"
    found = rows(check(str(write(tmp_path, engine.url, **changes))))
    assert list(found)[-2:] == ["ledger can be written", "Prefect server answers"]
    assert "PREFECT_API_URL=http://127.0.0.1:9/api does not answer" in found[list(found)[-1]]


@pytest.fixture
def shards(prefect_api: str) -> Iterator[str]:
    """A deployment of shards whose pool has a worker that has just polled."""
    made = CliRunner().invoke(app, ["deploy", "--pool", "checking"])
    assert made.exit_code == 0, made.exception
    workers = f"{prefect_api}/work_pools/checking/workers"
    heartbeat = {"name": "here", "heartbeat_interval_seconds": 30}
    httpx.post(f"{workers}/heartbeat", json=heartbeat).raise_for_status()
    yield "rollout-shard/rollout-shard"
    httpx.delete(f"{workers}/here").raise_for_status()
    with Api(prefect_api) as api:
        api.remove_automations()


def test_a_run_on_a_work_pool_is_started_by_its_deployment(
    engine: ModelServer, tmp_path: Path, shards: str
):
    changes = {"rollout": {"deployment": shards}, "preflight": {"canary": False}}
    done = check(str(write(tmp_path, engine.url, **changes)))
    assert list(rows(done))[-2:] == ["Prefect server answers", "work pool starts shards"]
    assert "Run checked can start: prefect deployment run training-run/checked" in done.stdout


@pytest.mark.parametrize(
    ("changes", "failing", "message"),
    [
        ({"agent": "nothing:x"}, "agent can be imported", "cannot import 'nothing'"),
        ({"train_data": "none.jsonl"}, "datasets can be read", "none.jsonl does not exist"),
        ({"ledger": "/dev/null/x"}, "ledger can be written", "ledger /dev/null/x: cannot write"),
        (
            {"rollout": {"deployment": "rollout-shard/none"}},
            "work pool starts shards",
            "`agl deploy` makes it",
        ),
    ],
)
@pytest.mark.usefixtures("prefect_api")
def test_the_check_that_fails_is_the_last_row_and_says_what_to_do(
    engine: ModelServer, tmp_path: Path, changes: dict[str, object], failing: str, message: str
):
    done = check(str(write(tmp_path, engine.url, **changes)))
    found = rows(done)
    assert done.exit_code == 2
    assert list(found)[-1] == failing
    assert message in found[failing]
    assert not (tmp_path / "ledger").exists()
