"""What is said about the Prefect server before anything is written, and one start at a time."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agl_core.errors import ConfigError, TransientError
from deployments.server import _starting_alone, named_server

HOLDER = """
import sys
from pathlib import Path
from deployments.server import _starting_alone
with _starting_alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


class _Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def api() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def hold(home: Path) -> "subprocess.Popen[str]":
    """Return a process that holds a home's lock until its standard input ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_server_of_a_home_starts_after_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with hold(tmp_path) as holder:
        with (
            pytest.raises(TransientError, match="another process has been starting a Prefect"),
            _starting_alone(tmp_path, deadline_seconds=0.3),
        ):
            pytest.fail("two processes hold the lock")
        assert caplog.text.count("waiting for another process") == 1
        assert holder.stdin is not None
        holder.stdin.close()
        with _starting_alone(tmp_path, deadline_seconds=30.0):
            pass


def test_a_process_that_is_killed_holds_up_no_server(tmp_path: Path):
    with hold(tmp_path) as holder:
        holder.kill()
        with _starting_alone(tmp_path, deadline_seconds=30.0):
            pass


def test_an_address_without_the_api_is_corrected(api: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", api)
    with pytest.raises(ConfigError, match=f"PREFECT_API_URL={api} has no API: set it to {api}/api"):
        named_server()
    for address in (f"{api}/api", f"{api}/api/", f" {api}/api\n"):
        monkeypatch.setenv("PREFECT_API_URL", address)
        assert named_server() == f"{api}/api" == os.environ["PREFECT_API_URL"]
    monkeypatch.setenv("PREFECT_API_URL", "localhost:4200/api")
    with pytest.raises(ConfigError, match="does not begin with http:// or https://; write http:"):
        named_server()


def test_a_user_without_a_home_is_told(api: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", f"{api}/api")
    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    with pytest.raises(ConfigError, match="user 987654 has no home folder: set HOME, or PREFECT_"):
        named_server()


def test_a_wrong_address_is_found_before_a_run_is_written(api: str, tmp_path: Path):
    config = tmp_path / "run.yaml"
    text = Path("examples/calculator/run.yaml").read_text()
    config.write_text(f"{text}\n")
    ledger = tmp_path / "ledger"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from deployments.cli import main; main()",
            "run",
            str(config),
            "--ledger",
            str(ledger),
        ],
        env=os.environ | {"PREFECT_API_URL": api},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert f"set it to {api}/api" in done.stderr
    assert "Traceback" not in done.stderr
    assert not ledger.exists()
