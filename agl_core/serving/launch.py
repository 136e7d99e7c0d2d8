"""The run's model server: start one (or attach to a running one), and have it serve a policy
version.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self, cast

import httpx

from agl_core import env_var
from agl_core.config import ServingSettings
from agl_core.errors import ConfigError, UpstreamError
from agl_core.ledger import files
from agl_core.ledger.storage import Storage
from agl_core.lifeline import ChildProcess, spawn
from agl_core.types.training import PolicyRef
from agl_core.utils.threaded_server import LOOPBACK

_LOAD_TIMEOUT_SECONDS = 600.0


def _with_host(url: str, host: str) -> str:
    """Return the URL with another host and the same port."""
    return str(httpx.URL(url).copy_with(host=host)).rstrip("/")


def check_server(url: str) -> None:
    """Return if an engine server answers at an address.

    Raises:
        UpstreamError: Nothing answers.
        ConfigError: What answers is not an engine server.
    """
    ask_server("GET", f"{url.rstrip('/')}/policy", timeout_seconds=30.0)


class ModelServer:
    """The one engine server of a run; what it serves changes between iterations."""

    def __init__(
        self,
        url: str,
        process: ChildProcess | None,
        private: "tempfile.TemporaryDirectory[str]",
        advertised_host: str | None = None,
    ) -> None:
        self.url = url
        """Base URL without `/v1`."""
        self.advertised_url = _with_host(url, advertised_host) if advertised_host else url
        """The same server as shards on other machines reach it."""
        self._process = process
        self._private = private

    @classmethod
    def start(cls, settings: ServingSettings, base: PolicyRef, folder: Path) -> Self:
        """Start an engine that serves the base policy, or attach to the one at `settings.url`.

        Args:
            settings: Where and how to serve.
            base: Policy to begin with; it has a local path.
            folder: Local folder for the log and for fetched weights.

        Raises:
            ConfigError: The engine would be open to other machines without a token.
            UpstreamError: The engine ended or did not answer in time; the message holds the end of
                its log.
        """
        token = env_var.engine_token()
        if settings.host not in LOOPBACK and token is None:
            raise ConfigError(
                f"serving.host {settings.host} is open to other machines: set a token in "
                f"{env_var.ENGINE_TOKEN}, here and where shards run"
            )
        if settings.url is not None:
            check_server(settings.url)
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        # Readable by this user alone, and gone when the server is stopped.
        private = tempfile.TemporaryDirectory(prefix="engine-", dir=folder)
        if settings.url is not None:
            return cls(settings.url.rstrip("/"), None, private)
        assert base.path is not None, "a run starts from a policy on this machine's disk"
        address = Path(private.name, "address")
        command = [sys.executable, "-m", "agl_core.serving.engine_main"]
        command += ["--model", base.path, "--version", base.version, "--port", "0"]
        command += ["--address-file", str(address), "--threads", str(settings.threads)]
        command += ["--max-batch-size", str(settings.max_batch_size), "--host", settings.host]
        if token is not None:
            token_file = Path(private.name, "token")
            token_file.write_text(token.get_secret_value())
            command += ["--token-file", str(token_file)]
        process = spawn(command, folder / "engine.log")
        deadline = time.monotonic() + settings.startup_timeout_seconds
        while not address.exists():
            if not process.is_running or time.monotonic() > deadline:
                process.stop()
                private.cleanup()
                raise UpstreamError(f"the model engine did not start:\n{process.log_tail()}")
            time.sleep(0.05)
        return cls(address.read_text().strip(), process, private, settings.advertised_host)

    def serve(self, policy: PolicyRef, storage: Storage) -> None:
        """Have the server answer with this policy; returns once it does.

        Raises:
            UpstreamError: The server is gone, refuses, or serves other weights than the policy's.
            LedgerError: The policy's files differ from their record.
        """
        served = self._served()
        if (served["version"], served["weights_digest"]) == (policy.version, policy.weights_digest):
            return
        with tempfile.TemporaryDirectory(prefix="policy-", dir=self._private.name) as fetched:
            folder = policy.path
            if policy.folder is not None:
                folder = str(files.fetch_folder(storage, policy.folder, Path(fetched)))
            served = ask_server(
                "POST", f"{self.url}/policy", {"version": policy.version, "path": folder}
            )
        if served["weights_digest"] != policy.weights_digest:
            raise UpstreamError(
                f"{self.url} serves weights {served['weights_digest']} as {policy.version}, "
                f"expected {policy.weights_digest}"
            )

    def metrics(self) -> dict[str, Any]:
        """Return the server's counters, for example `requests_total`."""
        return ask_server("GET", f"{self.url}/metrics")

    def stop(self) -> None:
        """End the engine, if it was started here."""
        if self._process is not None:
            self._process.stop()
        self._private.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _served(self) -> dict[str, Any]:
        return ask_server("GET", f"{self.url}/policy")


def ask_server(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    timeout_seconds: float = _LOAD_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Ask an engine server and return its answer.

    Raises:
        UpstreamError: It does not answer, refuses, or answers with something else than an object.
        ConfigError: It is no engine server, or wants another token.
    """
    token = env_var.engine_token()
    headers = {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}
    timeout = httpx.Timeout(timeout_seconds, connect=10.0)
    try:
        # Proxies in the environment (HTTP_PROXY) are not for the model server.
        answer = httpx.request(
            method, url, json=body, timeout=timeout, headers=headers, trust_env=False
        )
    except httpx.HTTPError as error:
        raise UpstreamError(f"model server {url} does not answer: {error}") from error
    if answer.status_code == 404:
        raise ConfigError(f"{url} is not found: is an engine server running there?")
    if answer.status_code == 401:
        raise ConfigError(
            f"model server {url} wants another token: set the one that it was started with in "
            f"{env_var.ENGINE_TOKEN}"
        )
    if answer.is_error:
        raise UpstreamError(f"model server {url} answers HTTP {answer.status_code}: {answer.text}")
    try:
        found = answer.json()
    except ValueError as error:
        raise UpstreamError(f"model server {url} answers with something else than JSON") from error
    if not isinstance(found, dict):
        raise UpstreamError(f"model server {url} answers with something else than a JSON object")
    return cast(dict[str, Any], found)
