"""The run's model server: start one (or attach to a running one), and have it serve a policy
version.
"""

import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from agl_core.config import ServingSettings
from agl_core.errors import ConfigError, UpstreamError
from agl_core.ledger import files
from agl_core.ledger.storage import Storage
from agl_core.lifeline import ChildProcess, spawn
from agl_core.types.training import PolicyRef

_LOAD_TIMEOUT_SECONDS = 600.0


class ModelServer:
    """The one engine server of a run; what it serves changes between iterations."""

    def __init__(self, url: str, process: ChildProcess | None, cache: Path) -> None:
        self.url = url
        """Base URL without `/v1`."""
        self._process = process
        self._cache = cache

    @classmethod
    def start(cls, settings: ServingSettings, base: PolicyRef, folder: Path) -> Self:
        """Start an engine that serves the base policy, or attach to the one at `settings.url`.

        Args:
            settings: Where and how to serve.
            base: Policy to begin with; it has a local path.
            folder: Local folder for the log and for fetched weights.

        Raises:
            UpstreamError: The engine ended or did not answer in time; the message holds the end of
            its log.
        """
        if settings.url is not None:
            server = cls(settings.url.rstrip("/"), None, folder)
            server._served()
            return server
        assert base.path is not None, "a run starts from a policy on this machine's disk"
        folder.mkdir(parents=True, exist_ok=True)
        address = Path(tempfile.mkdtemp(dir=folder)) / "address"
        command = [sys.executable, "-m", "agl_core.serving.engine_main"]
        command += ["--model", base.path, "--version", base.version, "--port", "0"]
        command += ["--address-file", str(address), "--threads", str(settings.threads)]
        command += ["--max-batch-size", str(settings.max_batch_size)]
        process = spawn(command, folder / "engine.log")
        deadline = time.monotonic() + settings.startup_timeout_seconds
        while not address.exists():
            if not process.is_running or time.monotonic() > deadline:
                process.stop()
                raise UpstreamError(f"the model engine did not start:\n{process.log_tail()}")
            time.sleep(0.05)
        return cls(address.read_text().strip(), process, folder)

    def serve(self, policy: PolicyRef, storage: Storage) -> None:
        """Have the server answer with this policy; returns once it does.

        Raises:
            UpstreamError: The server is gone, refuses, or serves other weights than the policy's.
            LedgerError: The policy's files differ from their record.
        """
        if policy.folder is not None:
            path = str(files.fetch_folder(storage, policy.folder, self._cache / "policies"))
        else:
            assert policy.path is not None, "a policy has a folder or a path"
            path = policy.path
        served = self._served()
        if served["weights_digest"] != policy.weights_digest or served["version"] != policy.version:
            body = {"version": policy.version, "path": path}
            served = self._call("POST", "/policy", body)
        if served["weights_digest"] != policy.weights_digest:
            raise UpstreamError(
                f"{self.url} serves weights {served['weights_digest']} as {policy.version}, "
                f"expected {policy.weights_digest}"
            )

    def metrics(self) -> dict[str, Any]:
        """Return the server's counters, for example `requests_total`."""
        return self._call("GET", "/metrics")

    def stop(self) -> None:
        """End the engine, if it was started here."""
        if self._process is not None:
            self._process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _served(self) -> dict[str, Any]:
        return self._call("GET", "/policy")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            timeout = httpx.Timeout(_LOAD_TIMEOUT_SECONDS, connect=10.0)
            # Proxies in the environment (HTTP_PROXY) are not for the model server.
            answer = httpx.request(
                method, self.url + path, json=body, timeout=timeout, trust_env=False
            )
        except httpx.HTTPError as error:
            raise UpstreamError(f"model server {self.url} does not answer: {error}") from error
        if answer.status_code == 404:
            raise ConfigError(f"{self.url} is not an engine server: it has no {path}")
        if answer.is_error:
            raise UpstreamError(f"model server {self.url}: {answer.text}")
        return answer.json()
