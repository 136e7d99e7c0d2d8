import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agl_core import InMemoryLightningStore, semconv
from agl_core.errors import ConfigError
from agl_core.store import LightningStoreServer
from deployments.proxy_command import parse_sampling
from tests.fakes import ScriptedModelServer

COMMAND = [sys.executable, "-c", "from deployments.cli import main; main()", "proxy"]


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "COLUMNS": "200"} | environment,
    )


async def test_a_proxy_records_until_it_is_told_to_stop():
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("x")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    with ScriptedModelServer() as server:
        async with LightningStoreServer(store, port=0) as served:
            arguments = ["--backend", server.base_url, "--store", served.endpoint, "--port", "0"]
            tokens = {"T": "word", "A": "boss"}
            process = start(
                *arguments,
                "--token-env",
                "T",
                "--admin-token-env",
                "A",
                "--price",
                "*=1,2",
                **tokens,
            )
            try:
                assert process.stdout is not None
                said = process.stdout.readline()
                found = re.search(r"http://[^/]+", said)
                assert found, process.communicate(timeout=10)[1]
                url = f"{found[0]}/rollout/{ids[0]}/attempt/{ids[1]}/v1/chat/completions"
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
                async with httpx.AsyncClient() as client:
                    assert (await client.post(url, json=body)).status_code == 401
                    headers = {"authorization": "Bearer word"}
                    answer = await client.post(url, json=body, headers=headers)
                    assert answer.status_code == 200
                    headers = {"authorization": "Bearer boss"}
                    usage = await client.get(f"{found[0]}/admin/usage", headers=headers)
                    assert usage.json()[ids[0]]["cost"] > 0
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=50)
                assert process.returncode == 0
            finally:
                process.kill()
                process.communicate()
        (span,) = await store.query_spans(*ids)
    assert span.attributes[semconv.RESPONSE_TOKEN_IDS]
    await store.close()


GOOD = ["--backend", "http://127.0.0.1:9/v1", "--store", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*GOOD[2:], "--backend", "localhost:8000"], "is no http:// or https:// URL"),
        ([*GOOD, "--price", "m=1"], "'m=1' is not MODEL=INPUT,OUTPUT"),
        ([*GOOD, "--sampling", "0.7"], "'0.7' is no JSON object"),
        ([*GOOD, "--validation-sampling", '{"model": "m"}'], "cannot set model"),
        ([*GOOD, "--token-env", "NOT_SET"], "the variable NOT_SET is not set"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(arguments: list[str], sentence: str):
    process = start(*arguments)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert sentence in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "NaN is no JSON number"),
        ("1" * 5_000, "4300 digits"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_sampling_that_json_cannot_keep_is_one_sentence(value: str, reason: str):
    with pytest.raises(ConfigError, match="is no JSON object.*" + reason):
        parse_sampling(f'{{"temperature": {value}}}')
