import signal
from pathlib import Path

import pytest

from agl_core.env_var import STORE_TOKEN
from agl_core.store import LightningStoreClient
from tests.deployments.store_process import StoreProcess, start_store


async def test_a_store_is_served_until_it_is_told_to_stop(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("word\n")
    path = str(tmp_path / "deep" / "store.db")
    with StoreProcess("--port", "0", "--path", path, "--token-file", str(file)) as process:
        assert "word" not in process.said
        client = LightningStoreClient(process.url, token="word", run_id=process.run_id)
        queued = await client.enqueue_rollout("task")
        await client.close()
        assert process.stop(signal.SIGINT) == 0
    with StoreProcess("--port", "0", "--path", path) as again:
        assert again.run_id == process.run_id
        async with LightningStoreClient(again.url) as client:
            assert await client.get_rollout_by_id(queued.rollout_id) == queued
        assert again.stop(signal.SIGTERM) == 0


def refused(*arguments: str, **environment: str) -> str:
    process = start_store(*arguments, **environment)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "Traceback" not in error
    return error


def test_a_port_that_is_taken_is_one_sentence():
    with StoreProcess("--port", "0", "--backend", "memory") as process:
        port = process.url.rpartition(":")[2]
        error = refused("--port", port, "--backend", "memory")
    assert f"agl: cannot listen on 127.0.0.1:{port}: Address already in use" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], f"a store on 0.0.0.0 needs a token ({STORE_TOKEN})"),
        (["--path", "x.db", "--backend", "memory"], "has no --path"),
        (["--path", "/dev/null/store.db"], "the store cannot be opened"),
        (["--path", "/"], "the store cannot be opened"),
        (["--port", "70000"], "the port is 70000"),
        (["--port", "-1"], "the port is -1"),
        (["--token", "a", "--token-file", "b"], "not both"),
        (["--token-file", "/nothing"], "token file /nothing cannot be read"),
        (["--token", "two words"], "printable ASCII"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path):
    if "--path" not in arguments and "--backend" not in arguments:
        arguments = [*arguments, "--backend", "memory"]
    error = refused("--port", "0", *arguments)
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_a_token_file_must_be_text(tmp_path: Path):
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    error = refused("--port", "0", "--backend", "memory", "--token-file", str(file))
    assert error.split() == f"agl: token file {file} is not UTF-8 text".split()
