"""`agl deploy` on a real server: what it makes, what it leaves alone, what it refuses."""

import contextlib
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import Result
from prefect.settings import get_current_settings
from typer.testing import CliRunner

from agl_core.config import RunConfig
from agl_core.errors import ConfigError
from deployments.cli import app
from tests.conftest import CALCULATOR
from tests.e2e.deployed import Api

SHARDS = "rollout-shard/rollout-shard"


@pytest.fixture(scope="module")
def api(prefect_api: str) -> Iterator[Api]:
    with Api(prefect_api) as client:
        client.remove_deployments()
        yield client
        client.remove_automations()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: an agent and a configuration, no prefect.yaml."""
    found = tmp_path_factory.mktemp("mine")
    (found / "my_agent.py").write_text("def solve(task, llm) -> float:\n    return 0.0\n")
    values = yaml.safe_load((CALCULATOR / "run.yaml").read_text())
    values |= {"run_id": "nightly-sums", "agent": "my_agent:solve"}
    values["rollout"] = {"deployment": SHARDS}
    (found / "run.yaml").write_text(yaml.safe_dump(values))
    return found


def deploy(folder: Path, *arguments: str) -> Result:
    """In this process: Prefect alone takes two seconds to load."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("COLUMNS", "200")
        return CliRunner().invoke(app, ["deploy", *arguments])


def rows(done: Result) -> dict[str, str]:
    """What became of each thing, by its name."""
    assert done.exit_code == 0, done.exception
    cells = [line.split("│")[2:4] for line in done.stdout.splitlines() if line.startswith("│")]
    found: dict[str, str] = {}
    for name, state in cells:
        if name.strip():
            found[name.strip()] = state.strip()
        else:  # the cell above goes on
            found[list(found)[-1]] += f" {state.strip()}"
    return found


def test_a_folder_is_deployed_once_and_then_found_as_it_should_be(api: Api, folder: Path):
    arguments = ["run.yaml", "--train-pool", "gpu", "--shard-pool", "cpu", "--shard-limit", "8"]
    arguments += ["--shard-folder", "/srv/agents", "--queue", "agents", "--on-dataset", "sums"]
    planned = rows(deploy(folder, *arguments, "--dry-run"))
    nightly = planned.pop("training-run/nightly-sums: nightly")
    assert nightly == "created (paused)"
    assert set(planned.values()) == {"created"}
    assert httpx.get(f"{api.url}/work_pools/gpu").status_code == 404, "nothing was made"

    made = rows(deploy(folder, *arguments))
    assert made == planned | {"training-run/nightly-sums: nightly": nightly}
    assert set(rows(deploy(folder, *arguments)).values()) == {"unchanged"}

    run = api.get("/deployments/name/training-run/nightly-sums")
    assert run["work_pool_name"] == "gpu"
    assert run["work_queue_name"] == "agents"
    assert run["job_variables"]["working_dir"] == str(folder)
    assert run["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "60"
    assert run["global_concurrency_limit"]["limit"] == 1
    config = RunConfig.model_validate(run["parameters"]["config"])
    assert (config.run_id, config.agent) == ("nightly-sums", "my_agent:solve")
    assert [schedule["active"] for schedule in run["schedules"]] == [False]

    shards = api.get(f"/deployments/name/{SHARDS}")
    assert shards["work_pool_name"] == "cpu"
    assert shards["global_concurrency_limit"]["limit"] == 8
    assert shards["job_variables"]["working_dir"] == "/srv/agents"
    (pull,) = shards["pull_steps"]
    assert list(pull.values()) == [{"directory": "/srv/agents"}]


def test_a_changed_setting_updates_just_that(api: Api, folder: Path):
    arguments = ["run.yaml", "--pool", "one"]
    rows(deploy(folder, *arguments))
    changed = rows(deploy(folder, *arguments, "--schedule", "30 1 * * *", "--pool-limit", "9"))
    assert {name: state for name, state in changed.items() if state != "unchanged"} == {
        "one": "updated: concurrency limit",
        "training-run/nightly-sums: nightly": "updated: active, schedule",
    }
    off = rows(deploy(folder, *arguments, "--schedule", "off"))
    assert [state for state in off.values() if state != "unchanged"] == ["updated: active"]
    (schedule,) = api.get("/deployments/name/training-run/nightly-sums")["schedules"]
    assert (schedule["active"], schedule["schedule"]["cron"]) == (False, "30 1 * * *")


def test_publishing_names_the_deployments_that_start_a_run(api: Api, folder: Path, tmp_path: Path):
    api.remove_automations()
    rows(deploy(folder, "run.yaml", "--pool", "one", "--on-dataset", "sums"))
    said = publish("sums", tmp_path)
    assert said.exit_code == 0, said.exception
    assert "A run of it is started by training-run/nightly-sums." in said.stderr
    said = publish("products", tmp_path)
    nobody = "No deployment listens to %s: agl deploy my_run.yaml --on-dataset "
    assert nobody % "products" in said.stderr
    off = ["run.yaml", "--pool", "one", "--on-dataset", "off"]
    changed = rows(deploy(folder, *off))
    assert [state for state in changed.values() if state != "unchanged"] == ["updated: active"]
    assert set(rows(deploy(folder, *off)).values()) == {"unchanged"}
    assert nobody % "sums" in publish("sums", tmp_path).stderr
    rows(deploy(folder, "run.yaml", "--pool", "one", "--on-dataset", "sums"))
    said = publish("sums", tmp_path, "2 + 2")
    assert "is started by training-run/nightly-sums" in said.stderr
    deadline = time.monotonic() + 30
    while not api.post("/events/filter", filter={"event": {"name": ["agl.dataset.published"]}})[
        "events"
    ]:
        assert time.monotonic() < deadline, "the server has no event"
        time.sleep(0.2)


def test_rows_that_a_deployment_has_a_run_on_start_no_second_one(
    api: Api, folder: Path, tmp_path: Path
):
    api.remove_automations()
    rows(deploy(folder, "run.yaml", "--pool", "one", "--on-dataset", "sums"))
    uri = publish("sums", tmp_path, "3 + 3").stdout.strip()
    (deployment,) = [d for d in api.post("/deployments/filter") if d["name"] == "nightly-sums"]
    moved = f"s3://elsewhere/{uri.removeprefix(str(tmp_path))}"
    made = {"name": "first", "parameters": {"train_data": moved, "config": {}}}
    path = f"/deployments/{deployment['id']}/create_flow_run"
    api.post(path, **made, enforce_parameter_schema=False)
    said = publish("sums", tmp_path, "3 + 3")
    assert "published before and have a run of training-run/nightly-sums (flow run" in said.stderr
    assert "nothing is started" in said.stderr
    assert "is started by" in publish("sums", tmp_path, "4 + 4").stderr


def publish(name: str, folder: Path, question: str = "1 + 1") -> Result:
    (folder / "rows.jsonl").write_text(json.dumps({"question": question}) + "\n")
    arguments = [name, str(folder / "rows.jsonl"), "--ledger", str(folder / "ledger")]
    return CliRunner().invoke(app, ["dataset", "publish", *arguments])


def test_a_changed_configuration_changes_what_its_trigger_starts(api: Api, folder: Path):
    arguments = ["--pool", "one", "--on-dataset", "sums"]
    rows(deploy(folder, "run.yaml", *arguments))
    values = yaml.safe_load((folder / "run.yaml").read_text()) | {"train_data": "other.jsonl"}
    (folder / "changed.yaml").write_text(yaml.safe_dump(values))
    (folder / "other.jsonl").write_text('{"question": "1 + 1"}\n')
    changed = rows(deploy(folder, "changed.yaml", *arguments))
    name = next(name for name, state in changed.items() if state == "updated: actions")
    (automation,) = automations(api, name)
    (action,) = automation["actions"]
    assert action["parameters"]["config"]["train_data"] == "other.jsonl"
    assert set(rows(deploy(folder, "changed.yaml", *arguments)).values()) == {"unchanged"}
    rows(deploy(folder, "run.yaml", *arguments))


def test_what_was_switched_in_the_ui_stays(api: Api, folder: Path):
    rows(deploy(folder, "run.yaml", "--pool", "one"))
    (automation,) = automations(api, "agl-restart-training-runs")
    httpx.patch(f"{api.url}/automations/{automation['id']}", json={"enabled": False})
    again = rows(deploy(folder, "run.yaml", "--pool", "one", "--queue", "other"))
    assert again["agl-restart-training-runs"] == "unchanged"
    (automation,) = automations(api, "agl-restart-training-runs")
    assert automation["enabled"] is False
    httpx.patch(f"{api.url}/automations/{automation['id']}", json={"enabled": True})


def test_killed_flow_runs_are_marked_after_three_of_the_slowest_heartbeats(api: Api, folder: Path):
    def within() -> float:
        (automation,) = automations(api, "agl-killed-flow-runs")
        return automation["trigger"]["within"]

    slow = rows(deploy(folder, "run.yaml", "--pool", "one", "--heartbeat", "90"))
    assert slow["agl-killed-flow-runs"] == "updated: trigger"
    assert within() == 270
    (folder / "other.yaml").write_text(
        (folder / "run.yaml").read_text().replace("nightly-sums", "other-sums")
    )
    deploy(folder, "other.yaml", "--pool", "one")
    assert within() == 270, "nightly-sums still sends every 90 s"
    deploy(folder, "run.yaml", "--pool", "one")
    assert within() == 180
    deploy(folder, "run.yaml", "other.yaml", "--pool", "one", "--heartbeat", "30")
    environments = [found["job_variables"]["env"] for found in api.post("/deployments/filter")]
    slowest = max(int(env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) for env in environments)
    assert within() == 3 * slowest
    ours = get_current_settings().flows.heartbeat_frequency
    assert ours is not None
    assert 3 * ours <= 90, "`agl run`, which no deployment configures, is left alone too"


def test_a_heartbeat_that_is_no_number_is_one_sentence(folder: Path):
    deployments = Path("prefect.yaml").read_text().replace('FREQUENCY: "60"', 'FREQUENCY: "often"')
    (folder / "prefect.yaml").write_text(deployments)
    done = deploy(folder, "run.yaml")
    (folder / "prefect.yaml").unlink()
    assert isinstance(done.exception, ConfigError)
    assert "FREQUENCY is 'often', not a whole number of seconds" in str(done.exception)


def automations(api: Api, name: str) -> list[dict[str, Any]]:
    return api.post("/automations/filter", automations={"name": {"any_": [name]}})


def test_prefects_own_deploy_gives_the_same_deployments(api: Api):
    """`prefect.yaml` is the one list: either command finds the other's work done."""
    root = Path.cwd()
    rows(deploy(root))
    command = [str(Path(sys.executable).with_name("prefect")), "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(rows(deploy(root)).values()) == {"unchanged"}


def test_a_restart_passes_every_parameter_of_the_flow_on(api: Api, folder: Path):
    from flows.training_run import training_run

    (automation,) = automations(api, "agl-restart-training-runs")
    (action,) = automation["actions"]
    assert set(action["parameters"]) == set(inspect.signature(training_run.fn).parameters)


@pytest.fixture(scope="module")
def mistaken(api: Api, folder: Path) -> Path:
    """The folder deployed to the pool `one`, with configurations that cannot be deployed."""
    rows(deploy(folder, "run.yaml", "--pool", "one"))
    values = yaml.safe_load((folder / "run.yaml").read_text())
    (folder / "unimportable.yaml").write_text(yaml.safe_dump(values | {"agent": "nothing:x"}))
    in_process = values | {"run_id": "in-process", "rollout": {}}
    (folder / "process.yaml").write_text(yaml.safe_dump(in_process))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--type", "nosuch", "--pool", "new"], "Prefect knows no work pools of type 'nosuch'"),
        (["--type", "docker", "--pool", "one"], "work pool one is of type process, not docker: "),
        (["run.yaml", "--pool-limit", "1"], "its shards wait for ever; raise it, or give shards "),
        (["run.yaml", "--schedule", "daily"], "--schedule 'daily' is no cron expression: use five"),
        (["run.yaml", "--schedule", "0 1 * * *", "--timezone", "Mars/Olympus"],
         "schedule nightly: there is no time zone 'Mars/Olympus'; give a name such as Europe/"),
        (["missing.yaml"], "configuration missing.yaml does not exist"),
        (["--ledger", "s3://bucket/x"], "name at least one"),
        (["unimportable.yaml"], "cannot import 'nothing'"),
        (["run.yaml", "run.yaml"], "two configurations have the run id nightly-sums: rename one"),
        (["process.yaml", "--shard-pool", "cpu"], "the shards of in-process run in the training"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(mistaken: Path, arguments: list[str], message: str):
    error = deploy(mistaken, *arguments).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_it_needs_a_server_that_answers(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://me:hunter2@127.0.0.1:9/api")
    error = deploy(folder).exception
    wanted = "start that server, or set PREFECT_API_URL to one that runs"
    assert str(error) == f"PREFECT_API_URL=http://127.0.0.1:9/api does not answer: {wanted}"
    monkeypatch.setenv("PREFECT_API_URL", "")
    assert "agl deploy needs a Prefect server: set PREFECT_API_URL" in str(deploy(folder).exception)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", ""])
def test_nothing_is_published_without_a_server(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT_API_URL", url)
    error = publish("sums", tmp_path).exception
    assert isinstance(error, ConfigError)
    assert ("does not answer" if url else "agl dataset publish needs a Prefect") in str(error)
    assert not (tmp_path / "ledger").exists()


def test_the_command_itself_ends_with_status_2_and_teaches(folder: Path):
    agl = [sys.executable, "-c", "from deployments.cli import main; main()", "deploy"]
    env = os.environ | {"PYTHONPATH": str(Path.cwd()), "COLUMNS": "100"}
    for arguments, status, said in [
        (["none.yaml"], 2, "agl: configuration none.yaml does not exist\n"),
        (["--help"], 0, "--on-dataset"),
    ]:
        done = subprocess.run(
            [*agl, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, said in done.stdout + done.stderr) == (status, True)
