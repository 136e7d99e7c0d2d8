"""A runner with the base package alone: no torch, no VERL, and nothing of the project's folder."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from agl_core import semconv
from agl_core.env_var import ENGINE_TOKEN
from agl_core.ledger import files
from agl_core.ledger.run import RunLedger
from agl_core.ledger.tables import SPANS
from agl_core.ledger.verify import verify_run
from tests.conftest import CALCULATOR, small_run, train
from tests.e2e.deployed import Api, deployed, on_pool

pytestmark = pytest.mark.slow

PACKAGES = ("agl_core", "flows", "tasks", "deployments")
TRAINING_ONLY = ("torch", "transformers", "verl", "matplotlib")


@dataclass(frozen=True, slots=True)
class Runner:
    """A virtual environment, and a folder with an agent, its data and `prefect.yaml`."""

    bin: Path
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, without a way to the project's folder."""
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def __call__(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / program), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """`pip install .` in a fresh environment."""
    root = tmp_path_factory.mktemp("runner")
    source, venv, folder = root / "source", root / "venv", root / "agents"
    for package in PACKAGES:
        shutil.copytree(package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(file, source)
    shutil.copytree(CALCULATOR, folder / CALCULATOR)
    shutil.copy("prefect.yaml", folder)
    for command in (
        ["venv", "--without-pip", str(venv)],
        # Compiling all 500 MB would take longer than installing them.
        ["pip", "--python", str(venv), "install", "--quiet", "--no-compile", str(source)],
    ):
        subprocess.run([sys.executable, "-m", *command], check=True)
    return Runner(venv / "bin", folder)


@pytest.fixture(scope="module")
def run(
    runner: Runner, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunLedger]:
    """Trained here, with its shards on the runner, which reaches the engine as another machine
    does: by its advertised name, with the token.
    """
    config = small_run(
        engine_url="",
        ledger=str(tmp_path_factory.mktemp("ledger")),
        run_id="base",
        val_data=None,
        serving={"host": "0.0.0.0", "advertised_host": "localhost"},
    )
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENGINE_TOKEN, "shared-by-both-sides")
        with deployed(runner.bin / "prefect", runner.folder, log, runner.env):
            yield train(on_pool(config))


def test_only_the_base_package_is_there(runner: Runner):
    where = runner("python", "-c", "import agl_core, flows, tasks; print(agl_core.__file__)")
    assert where.stdout.startswith(str(runner.bin.parent)), where.stderr
    for module in TRAINING_ONLY:
        assert f"No module named '{module}'" in runner("python", "-c", f"import {module}").stderr


def test_its_runner_runs_every_shard(run: RunLedger, runner: Runner, prefect_api: str):
    assert run.committed() == 2
    assert verify_run(run) == []
    for manifest in run.manifests():
        assert manifest.coverage.trained == manifest.coverage.expected == 16
        spans = pa.concat_tables(
            files.read_table(run.storage, file.key, SPANS)
            for file in manifest.files
            if file.key.endswith("spans.parquet")
        )
        roots = spans.filter(pc.equal(spans["name"], semconv.ROLLOUT_SPAN))
        places = [json.loads(attributes) for attributes in roots["attributes"].to_pylist()]
        assert {place[semconv.EXECUTABLE] for place in places} == {str(runner.bin / "python")}
        assert os.getpid() not in {place[semconv.PROCESS_ID] for place in places}
    with Api(prefect_api) as api:
        shards = [
            found for found in api.of_run("flow_runs", "base-") if "shard" in found["parameters"]
        ]
    assert len(shards) == 2
    assert all(
        shard["parameters"]["shard"]["model_server"].startswith("http://localhost:")
        for shard in shards
    )


def test_it_reads_and_verifies_the_record(run: RunLedger, runner: Runner):
    for arguments, said in [
        (["--help"], "Train LLM agents as a Prefect pipeline"),
        (["ledger", "show", "base", "--ledger", run.storage.uri], "v00"),
        (["ledger", "verify", "base", "--ledger", run.storage.uri], "every file as its manifest"),
    ]:
        done = runner("agl", *arguments)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


@pytest.mark.parametrize("options", [[], ["--model", "anywhere"]], ids=["file", "model"])
def test_it_says_what_training_needs(runner: Runner, options: list[str]):
    done = runner("agl", "run", str(CALCULATOR / "run.yaml"), *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("agl: training by VERL needs the extra 'train'")
    assert not (runner.folder / ".agl").exists()
