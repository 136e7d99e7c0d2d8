"""A vLLM that the run starts, supervised: a process with vLLM's routes and no model."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from agl_core.config import ServingSettings, VllmSettings
from agl_core.env_var import ENGINE_TOKEN
from agl_core.errors import ConfigError, UpstreamError
from agl_core.ledger import files
from agl_core.ledger.storage import Storage, open_storage
from agl_core.serving.launch import ModelServer, check_server
from agl_core.serving.vllm.policy_middleware import PolicyMiddleware
from agl_core.serving.weights import weights_digest
from agl_core.types.training import PolicyRef
from agl_core.utils.threaded_server import ThreadedServer
from tests.fake_vllm import FakeVllm

ROOT = Path(__file__).parents[4]


def write_policy(folder: Path, value: float) -> PolicyRef:
    folder.mkdir()
    save_file({"w": torch.full((2, 3), value)}, folder / "model.safetensors", {"format": "pt"})
    version = f"v{round(value):06}"
    return PolicyRef(version=version, weights_digest=weights_digest(folder), path=str(folder))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution `vllm` 0.32.0 whose server is the fake."""
    folder = tmp_path_factory.mktemp("packages")
    server = folder / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text("from tests.fake_vllm import main\nmain()\n")
    set_version(folder, "0.32.0")
    return folder


def set_version(folder: Path, version: str) -> None:
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def settings_of(packages: Path, *args: str, **more: object) -> ServingSettings:
    env = {"PYTHONPATH": os.pathsep.join(map(str, (packages, ROOT)))}
    vllm = VllmSettings(python=sys.executable, args=args, env=env)
    return ServingSettings.model_validate({"vllm": vllm, "startup_timeout_seconds": 60, **more})


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "ledger"))


@pytest.fixture
def first(tmp_path: Path) -> PolicyRef:
    return write_policy(tmp_path / "first", 0)


@pytest.fixture
def server(packages: Path, first: PolicyRef, tmp_path: Path) -> Iterator[ModelServer]:
    with ModelServer.start(settings_of(packages), first, tmp_path / "run") as server:
        yield server


def answered_by(server: ModelServer, version: str) -> str:
    """Return the name of the folder whose weights answer to a version."""
    body = {"model": version, "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-agl-policy-version"] == version
    return answer.json()["choices"][0]["message"]["content"]


def test_it_serves_one_policy_after_the_other(
    server: ModelServer, first: PolicyRef, tmp_path: Path, storage: Storage
) -> None:
    assert answered_by(server, "v000000") == "first"
    second = write_policy(tmp_path / "second", 1)
    server.serve(second, storage)
    server.serve(second, storage)
    assert answered_by(server, "v000001") == "second"
    server.serve(first, storage)
    assert answered_by(server, "v000000") == "first"
    log = (tmp_path / "run" / "vllm.log").read_text()
    assert log.count("Traceback") == 0


def test_a_policy_of_the_ledger_stays_on_disk_until_the_next_one_is_served(
    server: ModelServer,
    first: PolicyRef,
    tmp_path: Path,
    storage: Storage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "local_path", lambda _: None)  # as a bucket's
    local = write_policy(tmp_path / "second", 1)
    folder = files.put_folder(storage, "policy/", Path(str(local.path)))
    server.serve(local.model_copy(update={"path": None, "folder": folder}), storage)
    fetched = list((tmp_path / "run").glob("engine-*/policy-*"))
    assert len(fetched) == 1
    assert answered_by(server, "v000001") == "policy"
    assert [*fetched[0].rglob("model.safetensors")]
    server.serve(first, storage)
    assert not fetched[0].exists()
    server.stop()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["vllm.log"]


def test_weights_that_end_it_have_it_started_again_with_the_old_ones(
    server: ModelServer, tmp_path: Path, storage: Storage
) -> None:
    second = write_policy(tmp_path / "second", 1)
    (tmp_path / "second" / "DEADLY").touch()
    with pytest.raises(UpstreamError, match=r"v000001 ended the model server, .* with v000000"):
        server.serve(second, storage)
    assert answered_by(server, "v000000") == "first"


def test_one_that_was_killed_is_started_again_with_the_policy_asked_for(
    server: ModelServer, tmp_path: Path, storage: Storage
) -> None:
    pid = int(httpx.get(f"{server.url}/pid").text)
    os.kill(pid, signal.SIGKILL)
    server.serve(write_policy(tmp_path / "second", 1), storage)
    assert answered_by(server, "v000001") == "second"


def test_files_of_other_weights_are_not_served(
    server: ModelServer, tmp_path: Path, storage: Storage
) -> None:
    second = write_policy(tmp_path / "second", 1)
    wrong = second.model_copy(update={"weights_digest": "sha256:0"})
    with pytest.raises(UpstreamError, match=r"holds weights sha256:\w+, expected sha256:0"):
        server.serve(wrong, storage)
    assert answered_by(server, "v000000") == "first"


def test_a_start_that_fails_says_what_the_log_says(
    packages: Path, first: PolicyRef, tmp_path: Path
) -> None:
    with pytest.raises(UpstreamError, match=r"vLLM did not start: it ended\n(.*\n)*no memory for"):
        ModelServer.start(settings_of(packages, "--fail"), first, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["vllm.log"]


def test_a_vllm_without_token_ids_is_refused_at_its_start(
    packages: Path, first: PolicyRef, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="nothing to train on: no token ids in the answer; inst"):
        ModelServer.start(settings_of(packages, "--no-token-ids"), first, tmp_path / "run")


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "has no vLLM installed"), ("0.9.2", "vLLM 0.9.2 is too old for token ids")],
)
def test_an_environment_that_cannot_serve_is_refused_before_anything_starts(
    first: PolicyRef, tmp_path: Path, version: str | None, message: str
) -> None:
    empty = tmp_path / "packages"
    empty.mkdir()
    if version is not None:
        set_version(empty, version)
    with pytest.raises(ConfigError, match=message):
        ModelServer.start(settings_of(empty), first, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_of_the_run_cannot_be_given_twice(
    packages: Path, first: PolicyRef, tmp_path: Path
) -> None:
    for argument in (
        "--port=1",
        "--logprobs-mode",
        "--served_model_name",
        "--generation-config=auto",
        "--override-generation-config",
    ):
        settings = settings_of(packages, argument)
        with pytest.raises(ConfigError, match="is set by the run; leave it out"):
            ModelServer.start(settings, first, tmp_path / "run")
    for argument, refusal in (
        ("--logits-processors", "--logits-processors changes the distribution"),
        ("--config=more.yaml", "--config names a file of further arguments"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            ModelServer.start(settings_of(packages, argument), first, tmp_path / "run")
    missing = ServingSettings(vllm=VllmSettings(python=str(tmp_path / "python")))
    with pytest.raises(ConfigError, match="cannot be run"):
        ModelServer.start(missing, first, tmp_path / "run")


def test_settings_of_the_embedded_engine_are_refused_beside_vllm(packages: Path) -> None:
    with pytest.raises(ValueError, match="max_batch_size: of the embedded engine"):
        settings_of(packages, max_batch_size=8)
    with pytest.raises(ValueError, match=r"vllm, .*: only for an engine that the run starts"):
        settings_of(packages, url="http://127.0.0.1:1")


def test_an_attached_vllm_must_give_logprobs_of_the_sampling_temperature(
    packages: Path, first: PolicyRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("VERSION", "v000000"), ("DIGEST", first.weights_digest)):
        monkeypatch.setenv(f"AGL_POLICY_{name}", value)
    monkeypatch.setenv("AGL_POLICY_PATH", str(first.path))
    monkeypatch.setenv("AGL_POLICY_MODEL", "policy")
    for mode in ("raw_logprobs", "processed_logprobs"):
        fake = FakeVllm("policy", str(first.path), logprobs_mode=mode)
        fake.app.add_middleware(PolicyMiddleware)
        with ThreadedServer(fake.app) as server:
            if mode == "raw_logprobs":
                with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
                    check_server(server.url)
                continue
            check_server(server.url)
            with ModelServer.start(ServingSettings(url=server.url), first, tmp_path) as attached:
                second = write_policy(tmp_path / "second", 1)
                attached.serve(second, open_storage(str(tmp_path / "ledger")))
                assert answered_by(attached, "v000001") == "second"


def test_the_token_is_asked_for_and_vllms_own_routes_are_closed_without_it(
    packages: Path, first: PolicyRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_TOKEN, "only-for-us")
    with ModelServer.start(settings_of(packages), first, tmp_path / "run") as server:
        assert httpx.post(f"{server.url}/collective_rpc", json={}).status_code == 401
        server.serve(write_policy(tmp_path / "second", 1), open_storage(str(tmp_path / "ledger")))
    assert "only-for-us" not in (tmp_path / "run" / "vllm.log").read_text()
