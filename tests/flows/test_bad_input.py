"""What a flow refuses ends as a failed run whose message is one sentence, and leaves nothing."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.exceptions import PrefectHTTPStatusError

from agl_core.config import RunConfig
from agl_core.errors import AglError
from agl_core.ledger.run import RunLedger
from agl_core.serving.launch import ModelServer
from flows.training_run import training_run
from tests.conftest import CALCULATOR, small_run
from tests.fakes import ScriptedModelServer

pytestmark = pytest.mark.usefixtures("prefect_api")

Change = Callable[[dict[str, Any], Path], None]


def bad_row(config: dict[str, Any], folder: Path) -> None:
    config["train_data"] = str(folder / "rows.jsonl")
    Path(config["train_data"]).write_text('{"question": "1+1"}\nnot json\n')


def other_policy(change: Callable[[Path], None]) -> Change:
    """The run trains a policy that is not quite the one that the engine serves."""

    def change_policy(config: dict[str, Any], folder: Path) -> None:
        shutil.copytree(CALCULATOR / "policy", folder / "policy")
        change(folder / "policy")
        config["algorithm"]["config"]["actor_rollout_ref.model.path"] = str(folder / "policy")

    return change_policy


def other_tokenizer(policy: Path) -> None:
    tokenizer = json.loads((policy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (policy / "tokenizer.json").write_text(json.dumps(tokenizer))


def other_template(policy: Path) -> None:
    (policy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def setting(**changes: Any) -> Change:
    return lambda config, folder: config.update(changes)


def verl(**changes: Any) -> Change:
    return lambda config, folder: config["algorithm"]["config"].update(changes)


KINDS: list[tuple[Change, str]] = [
    (setting(agent="examples.nothing:x"), "agent 'examples.nothing:x': cannot import"),
    (setting(train_data="missing.jsonl"), "dataset missing.jsonl does not exist"),
    (bad_row, "rows.jsonl, line 2 is not JSON"),
    (verl(**{"data.train_batch_sizes": 4}), "data.train_batch_sizes"),
    (verl(**{"actor_rollout_ref.model.path": "no/policy"}), "model folder no/policy does not"),
    (setting(ledger="gs://bucket/x"), "use a local folder or s3://bucket/prefix"),
    (setting(ledger="/dev/null/ledger"), "ledger /dev/null/ledger: cannot write"),
    (setting(serving={"url": "http://127.0.0.1:9"}), "http://127.0.0.1:9/policy does not answer"),
    (other_policy(other_tokenizer), "has another tokenizer than the policy"),
    (other_policy(other_template), "has another chat template than the policy"),
]


async def refusal(config: RunConfig | dict[str, Any], **parameters: Any) -> str:
    """Start the flow and return the message of its failed run, as the server keeps it."""
    start: Any = training_run
    state = await start(config, **parameters, return_state=True)
    assert state.is_failed()
    async with get_client() as client:
        run = await client.read_flow_run(state.state_details.flow_run_id)
    assert run.state
    assert run.state.is_failed()
    return run.state.message or ""


def check_sentence(message: str, expected: str) -> None:
    assert expected in message
    assert "exception" not in message
    assert "Traceback" not in message
    assert "\n" not in message


@pytest.mark.parametrize(("change", "expected"), KINDS)
async def test_a_bad_input_fails_the_flow_in_one_sentence_and_leaves_nothing(
    engine: ModelServer, tmp_path: Path, change: Change, expected: str
):
    config = small_run(engine.url, str(tmp_path / "ledger")).model_dump(mode="json")
    change(config, tmp_path)
    check_sentence(await refusal(config), expected)
    assert not (tmp_path / "ledger").exists()


@pytest.fixture
def server_without_ids() -> Iterator[str]:
    with ScriptedModelServer() as server:
        server.token_ids = False
        yield server.base_url.removesuffix("/v1")


async def test_a_server_without_token_ids_fails_the_flow(server_without_ids: str, tmp_path: Path):
    config = small_run(server_without_ids, str(tmp_path / "ledger"))
    check_sentence(await refusal(config), "gives nothing to train on: no token ids in the answer")
    assert not (tmp_path / "ledger").exists()


async def test_a_run_that_exists_with_another_configuration_is_left_as_it_is(trained: RunLedger):
    before = trained.storage.list("")
    data = str(CALCULATOR / "data" / "val.jsonl")
    config = trained.record().config.model_copy(update={"seed": 2, "train_data": data})
    message = await refusal(config)
    check_sentence(message, "run 'trained' exists in")
    assert "config.seed was 1, now 2; config.train_data was" in message
    deployed = "prefect deployment run training-run/trained --param allow_changed=true"
    assert message.endswith(f"--allow-changed ({deployed}): the manifests will say what changed")
    assert trained.storage.list("") == before


async def test_a_name_that_grows_too_long_is_refused(engine: ModelServer, tmp_path: Path):
    config = small_run(engine.url, str(tmp_path / "ledger"), run_id="x" * 60)
    check_sentence(await refusal(config, new_run=True), "run_id: run id")
    assert not (tmp_path / "ledger").exists()
    async with get_client() as client:
        names = FlowRunFilterName(like_=f"{config.run_id}-2")
        (run,) = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name=names))
    assert re.fullmatch(r"x{60}-\d{8}-\d{6}", run.name), "the UI shows the run's own name"


def test_whoever_calls_the_flow_gets_the_error_itself(tmp_path: Path):
    config = small_run("http://127.0.0.1:9", str(tmp_path / "ledger"))
    with pytest.raises(AglError, match="does not answer"):
        asyncio.run(training_run(config))


async def test_settings_are_checked_by_prefect_before_the_flow(tmp_path: Path):
    """Its API refuses to make such a run; where it is made without the API, it fails."""
    config = small_run("http://127.0.0.1:9", str(tmp_path / "ledger")).model_dump(mode="json")
    config |= {"run_ids": "x"}
    message = await refusal(config)
    assert message.endswith("config.run_ids: Extra inputs are not permitted")
    start: Any = training_run
    deployment: Any = await start.ato_deployment("refuses")
    deployment_id = await deployment.aapply()
    async with get_client() as client:
        with pytest.raises(PrefectHTTPStatusError, match=r"\('run_ids' was unexpected\)"):
            await client.create_flow_run_from_deployment(
                deployment_id, parameters={"config": config}
            )
    assert not (tmp_path / "ledger").exists()
