import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from agl_core.serving.engine_main import main
from agl_core.utils.foreign_requests import is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_open_address_needs_a_token(policy_folder: Path) -> None:
    arguments = ["--model", str(policy_folder), "--version", "v000000", "--host", "0.0.0.0"]
    assert main(arguments) == 2


def test_unusable_model_folder_ends_in_status_2(tmp_path: Path) -> None:
    assert main(["--model", str(tmp_path), "--version", "v000000"]) == 2


def test_process_announces_its_address_and_serves_the_openai_client(
    policy_folder: Path, tmp_path: Path
) -> None:
    address, token = tmp_path / "address", tmp_path / "token"
    token.write_text("secret\n")
    command = [sys.executable, "-m", "agl_core.serving.engine_main", "--version", "v000000"]
    command += ["--model", str(policy_folder), "--threads", "1"]
    command += ["--address-file", str(address), "--token-file", str(token)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not address.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        url = f"{address.read_text()}/v1"
        with OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="v000000",
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=4,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
        extra: Any = answer.choices[0].model_extra
        assert answer.usage is not None
        assert len(extra["token_ids"]) == answer.usage.completion_tokens
        assert {file.name for file in tmp_path.iterdir()} == {"address", "token"}
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert b"serving at http://127.0.0.1:" in log
