"""The command `agl train`."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.preflight import prepare_run
from agl_core.serving.launch import ModelServer
from agl_core.trainer.trainer import Trainer
from deployments.cli import app, read_config, with_overrides
from tests.conftest import CALCULATOR

WITHOUT_PREFECT = (
    "import sys; sys.modules['prefect'] = None; from deployments.cli import main; main()"
)


def agl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT_PREFECT, "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.long
@pytest.mark.slow
def test_it_trains_where_prefect_is_not_installed(engine: ModelServer, tmp_path: Path):
    values = yaml.safe_load((CALCULATOR / "run.yaml").read_text())
    values |= {"serving": {"url": engine.url}, "ledger": str(tmp_path / "ledger"), "val_data": None}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    file = ("-c", str(tmp_path / "run.yaml"), "--run-id", "mine", "--runners", "2")
    small = ("data.train_batch_size=4", "trainer.total_training_steps=1")
    done = agl(*file, *small)
    assert done.returncode == 0, done.stderr
    assert "run mine" in done.stdout
    ledger = open_run(str(tmp_path / "ledger"), "mine")
    (manifest,) = ledger.manifests()
    assert manifest.coverage.trained + manifest.coverage.filtered == 32
    assert verify_run(ledger) == []
    own = read_config(tmp_path / "run.yaml", {"run_id": "mine"})
    prepared = prepare_run(with_overrides(own, list(small)))
    assert prepared.algorithm.done(prepared.state_after(1)), "it is the same run to agl run"
    again = agl(*file, *small, "--strategy", "shm")
    assert again.returncode == 0, "complete, so nothing is done"
    assert len(ledger.starts.all()) == 1
    assert "Run mine is complete. Start another one with --run-id NAME.\n" in again.stdout
    assert again.stderr == "", "nothing is starting"


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", interrupted)
    values = yaml.safe_load((CALCULATOR / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"ledger": str(tmp_path / "none")}))
    done = CliRunner().invoke(app, ["train", "-c", str(tmp_path / "run.yaml")])
    assert done.exit_code == 130
    assert done.stderr.endswith(
        "agl: interrupted; the same command goes on where the ledger ends\n"
    )


def test_a_setting_of_the_work_pool_is_one_sentence(tmp_path: Path):
    values = yaml.safe_load((CALCULATOR / "run.yaml").read_text())
    values["rollout"] = {"deployment": "rollout-shard/rollout-shard"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    done = agl("-c", str(tmp_path / "run.yaml"))
    assert done.returncode == 2
    assert "rollout.deployment: of the pipeline (agl run)" in done.stderr
