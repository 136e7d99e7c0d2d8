"""The command line as users run it: a process, its streams and its exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
import yaml
from moto import settings as moto_settings

from agl_core.preflight import prepare_run
from deployments.cli import read_config
from tests.conftest import CALCULATOR

MARK = "AGL_TEST_MARK"
AGL = [sys.executable, "-c", "from deployments.cli import main; main()"]


def agl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [*AGL, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=env | environment,
    )


def write_config(folder: Path, **changes: object) -> Path:
    values = yaml.safe_load((CALCULATOR / "run.yaml").read_text())
    values |= {"ledger": str(folder / "ledger"), **changes}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_settings_of_s3_with_a_local_ledger_are_a_mistake(tmp_path: Path):
    done = agl("run", str(write_config(tmp_path, s3={"region": "eu-west-1"})))
    assert done.returncode == 2
    assert "s3: settings of an s3:// ledger; this one is " in done.stderr
    shown = agl("ledger", "show", "x", "--ledger", str(tmp_path), "--s3-region", "eu-west-1")
    assert shown.returncode == 2
    assert "s3: settings of an s3:// ledger; this one is " in shown.stderr


def test_a_block_needs_a_server_to_ask(tmp_path: Path):
    config = write_config(
        tmp_path, ledger="s3://bucket/agl", s3={"credentials": "aws-credentials/ledger"}
    )
    done = agl("run", str(config))
    assert done.returncode == 2
    assert "Prefect block aws-credentials/ledger needs a Prefect server: set" in done.stderr


@pytest.fixture
def guarded(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Keys of a user that may only read; the store checks every key until the test ends."""
    iam: Any = boto3.client("iam")
    name = f"reader-of-{s3_uri.split('/')[2]}"
    iam.create_user(UserName=name)
    allowed = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName=name, PolicyName="read", PolicyDocument=policy)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    return {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "access denied with the credentials from the environment (AWS_*); correct them, or g"),
        ({"AWS_ACCESS_KEY_ID": "AKIAWRONG"}, "the store refused the credentials from the environ"),
        ({"AWS_SECRET_ACCESS_KEY": "guess"}, "the store refused the credentials from the environ"),
    ],
)  # fmt: skip
def test_wrong_credentials_are_one_sentence_and_status_2_and_leave_nothing(
    tmp_path: Path, s3_uri: str, guarded: dict[str, str], keys: dict[str, str], message: str
):
    done = agl("run", str(write_config(tmp_path, ledger=s3_uri)), **guarded | keys)
    assert done.returncode == 2, done.stderr
    assert f"ledger {s3_uri}: cannot write there: {message}" in done.stderr.replace("\n", " ")
    assert (guarded | keys)["AWS_SECRET_ACCESS_KEY"] not in done.stderr
    assert "Traceback" not in done.stderr
    reader = boto3.client("s3", **{name.lower(): value for name, value in guarded.items()})
    assert reader.list_objects_v2(Bucket=s3_uri.split("/")[2])["KeyCount"] == 0


def test_a_run_is_shown_with_the_right_to_read_only(
    tmp_path: Path, s3_uri: str, request: pytest.FixtureRequest
):
    prepare_run(read_config(write_config(tmp_path, ledger=s3_uri), {}))
    shown = agl(
        "ledger", "show", "calculator", "--ledger", s3_uri, **request.getfixturevalue("guarded")
    )
    assert shown.returncode == 0, shown.stderr


def test_help_teaches(tmp_path: Path):
    done = agl("run", "--help", COLUMNS="200")
    assert done.returncode == 0
    assert "goes on where its ledger ends" in done.stdout
    assert "Example: agl run examples/calculator/run.yaml" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_ids": "x"}, "unknown setting 'run_ids'; did you mean 'run_id'?"),
        ({"rollout": {"timeout_second": 1}}, "did you mean 'timeout_seconds'?"),
        ({"serving": {"url": "127.0.0.1:9"}}, "'127.0.0.1:9' does not begin with http:// or https://"),
        ({"ledger": "s3://"}, "ledger 's3://' names no bucket: use s3://bucket/prefix"),
        ({"run_id": "Not A Name"}, "run_id: run id 'Not A Name': use up to 63"),
        ({"agent": "examples.nothing:x"}, "cannot import 'examples.nothing'"),
        ({"agent": "examples.calculator.agent:nothing"}, "nothing"),
        ({"train_data": "missing.jsonl"}, "dataset missing.jsonl does not exist"),
        ({"ledger": "gs://x"}, "use a local folder or s3://bucket/prefix"),
        ({"ledger": "/dev/null/ledger"}, "ledger /dev/null/ledger: cannot write"),
        ({"serving": {"url": "http://127.0.0.1:9"}}, "http://127.0.0.1:9/policy does not answer"),
        (
            {"algorithm": {"type": "verl", "config": {"data.train_batch_sizes": 4}}},
            "data.train_batch_size",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_status_2_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, object], message: str
):
    done = agl("run", str(write_config(tmp_path, **changes)))
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("agl: ") == 1
    assert not (tmp_path / "ledger").exists()


def test_a_row_that_is_not_json_is_named_by_its_line(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1"}\nnot json\n')
    done = agl("run", str(write_config(tmp_path, train_data=str(tmp_path / "rows.jsonl"))))
    assert done.returncode == 2
    assert "rows.jsonl, line 2 is not JSON" in done.stderr
    assert not (tmp_path / "ledger").exists()


def test_a_bucket_that_does_not_exist_is_named(tmp_path: Path, s3_uri: str):
    done = agl("run", str(write_config(tmp_path, ledger="s3://no-such-bucket/x")))
    assert done.returncode == 2
    assert "ledger s3://no-such-bucket/x: cannot write there: there is no bucket" in done.stderr
    shown = agl("ledger", "show", "x", "--ledger", "s3://no-such-bucket/x")
    assert shown.returncode == 2
    assert "there is no bucket no-such-bucket" in shown.stderr


def test_an_address_that_is_no_engine_is_said(tmp_path: Path, s3_server: str):
    done = agl("run", str(write_config(tmp_path, serving={"url": f"{s3_server}/bucket"})))
    assert done.returncode == 2
    assert "is an engine server running there" in done.stderr


def test_the_option_for_the_model_replaces_the_files(tmp_path: Path):
    done = agl("run", str(write_config(tmp_path)), "--model", str(tmp_path / "none"))
    assert done.returncode == 2
    assert f"model folder {tmp_path / 'none'} does not exist" in done.stderr.replace("\n", "")
    assert not (tmp_path / "ledger").exists()


def test_a_run_that_is_not_there_is_said(tmp_path: Path):
    done = agl("ledger", "show", "nothing", "--ledger", str(tmp_path))
    assert done.returncode == 2
    assert "there is no run 'nothing' in" in done.stderr


@pytest.mark.slow
def test_a_run_with_its_own_server_ends_well_and_leaves_no_process(tmp_path: Path):
    """The demo, made small: everything is started, drained and stopped by one command."""
    verl = yaml.safe_load((CALCULATOR / "run.yaml").read_text())["algorithm"]["config"]
    verl |= {"trainer.total_training_steps": 1, "data.val_max_samples": 4}
    config = write_config(tmp_path, algorithm={"type": "verl", "config": verl})
    root = Path.cwd()
    env = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", MARK: str(tmp_path)}
    (tmp_path / "examples").symlink_to(root / "examples")
    done = subprocess.run(
        [*AGL, "run", str(config)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")} | env,
    )
    assert done.returncode == 0, done.stderr
    assert "iteration 0: reward" in done.stderr
    assert "Reward plot: " in done.stdout
    plot = next((tmp_path / "ledger").rglob("reward.png"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert alive(str(tmp_path)) == []

    again = agl("run", str(config), PYTHONPATH=str(root))
    assert again.returncode == 0
    assert "is complete" in again.stdout

    verified = agl("ledger", "verify", "calculator", "--ledger", str(tmp_path / "ledger"))
    assert (verified.returncode, verified.stdout.count("every file as its manifest says")) == (0, 1)
    manifest = next((tmp_path / "ledger").rglob("triplets.parquet"))
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    verified = agl("ledger", "verify", "calculator", "--ledger", str(tmp_path / "ledger"))
    assert verified.returncode == 1
    assert "triplets.parquet has sha256" in verified.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT]
)
def test_a_signal_ends_a_run_and_its_children_soon_and_leaves_it_resumable(
    tmp_path: Path, number: signal.Signals
):
    (tmp_path / "examples").symlink_to(Path.cwd() / "examples")
    (tmp_path / "tmp").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    env[MARK] = str(tmp_path)
    command = [*AGL, "run", str(write_config(tmp_path))]
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has its background jobs ignore SIGINT, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 200
    while not list((tmp_path / "ledger").rglob("iterations/000000/rollouts/*/claims/*.json")):
        assert time.monotonic() < deadline, "no rollout was begun in time"
        time.sleep(0.1)
    assert len(alive(str(tmp_path))) >= 3, "the run, its server, its engine"
    sent = time.monotonic()
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert time.monotonic() - sent < 20, "10 s of grace, and a busy machine"
    assert run.returncode == 130
    assert said.endswith("agl: interrupted; the same command goes on where the ledger ends\n")
    assert "Traceback" not in said
    while alive(str(tmp_path)):
        assert time.monotonic() < sent + 60, "a server or an engine lives on"
        time.sleep(0.5)
    files = [path for path in (tmp_path / "ledger").rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".")]
    verified = agl("ledger", "verify", "calculator", "--ledger", str(tmp_path / "ledger"))
    assert verified.returncode == 0


def alive(mark: str) -> list[str]:
    """Processes that a command with this mark in its environment started, itself included."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.info['cmdline'])}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
