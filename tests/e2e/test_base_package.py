"""A runner with the base package alone: no torch, no VERL, and nothing of the project's folder."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from moto.server import ThreadedMotoServer

from agl_core import semconv
from agl_core.env_var import ENGINE_TOKEN
from agl_core.errors import ConfigError
from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.run import RunLedger
from agl_core.ledger.tables import SPANS
from agl_core.ledger.verify import verify_run
from agl_core.lifeline import spawn
from tests.conftest import CALCULATOR, small_run, train
from tests.e2e.deployed import Api, deployed, on_pool
from tests.e2e.namespaces import OtherHost, forwarded, other_host

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
            files.read_table(run.storage, file, SPANS)
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
        url.startswith("http://localhost:")
        for shard in shards
        for url in shard["parameters"]["shard"]["model_servers"]
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


@pytest.mark.long
def test_a_runner_on_another_host_reaches_everything_by_one_address(
    runner: Runner,
    prefect_api: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Its own network namespace, host name and environment; set up by `agl deploy`, tried by the
    canary, with the ledger in a bucket and a token for the engine.
    """
    with other_host() as host, bucket(host.head, monkeypatch) as ledger:
        monkeypatch.setenv(ENGINE_TOKEN, "shared-by-both-sides")
        deployed = runner("agl", "deploy", "--shard-pool", "far", "--train-pool", "near")
        assert deployed.returncode == 0, deployed.stderr
        config = on_pool(
            small_run(
                engine_url="",
                ledger=ledger,
                run_id="far",
                val_data=None,
                serving={"host": "0.0.0.0", "advertised_host": host.head},
                preflight={"canary": True},
            )
        )
        config.algorithm.config["trainer.total_training_steps"] = 1
        with pytest.raises(ConfigError, match="no worker polls its work pool far"):
            train(config)
        port = urlsplit(prefect_api).port
        assert port is not None
        with forwarded(host.head, port) as port_there:
            url = f"http://{host.head}:{port_there}/api"
            assert not reaches(runner, host, prefect_api), "the loopback address is another one"
            assert reaches(runner, host, url)
            start = [str(runner.bin / "prefect"), "worker", "start", "--pool", "far"]
            start += ["--type", "process", "--name", host.name]
            env = {**runner.env, "PREFECT_API_URL": url, "PREFECT_WORKER_QUERY_SECONDS": "1"}
            with spawn(host.command(start), tmp_path / "log", env) as worker:
                with Api(prefect_api) as api:
                    api.wait_for_worker("far", host.name, worker)
                run = train(config)
        (manifest,) = run.manifests()
        assert manifest.coverage.trained == manifest.coverage.expected == 16
        assert verify_run(run) == []
        for places in (root_places(run, "rollouts/train/"), root_places(run, "rollouts/canary/")):
            assert {place[semconv.HOST_NAME] for place in places} == {host.name}
            assert {place[semconv.EXECUTABLE] for place in places} == {str(runner.bin / "python")}
    with Api(prefect_api) as api:
        api.remove_automations()


@contextmanager
def bucket(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A ledger in an S3 API that both hosts reach."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="far")
        yield "s3://far/agl"
    finally:
        server.stop()


def reaches(runner: Runner, host: OtherHost, url: str) -> bool:
    """Say whether the other host gets an answer of a Prefect server there."""
    ask = f"import httpx; httpx.get('{url}/health', timeout=10).raise_for_status()"
    command = host.command([str(runner.bin / "python"), "-c", ask])
    return subprocess.run(command, env=runner.env, capture_output=True, check=False).returncode == 0


def root_places(run: RunLedger, prefix: str) -> list[dict[str, object]]:
    """What the root spans of a set of rollouts say about where they ran."""
    keys = run.storage.list(f"{run.iteration(0).prefix}{prefix}")
    flushed = [Unrecorded(key) for key in keys if key.endswith("spans.parquet")]
    tables = [files.read_table(run.storage, file, SPANS) for file in flushed]
    spans = pa.concat_tables(tables)
    roots = spans.filter(pc.equal(spans["name"], semconv.ROLLOUT_SPAN))
    assert len(roots) > 0
    return [json.loads(attributes) for attributes in roots["attributes"].to_pylist()]
