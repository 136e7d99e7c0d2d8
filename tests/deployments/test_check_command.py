"""`agl check`: one row a check, the sentence of the one that fails, and no run begun."""

from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from agl_core.config import RunConfig
from agl_core.errors import LedgerError
from agl_core.ledger.run import open_run
from agl_core.serving.launch import ModelServer
from deployments.cli import app
from tests.conftest import small_run


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
    with pytest.raises(LedgerError):
        run.iteration(0).finished("propose")


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
