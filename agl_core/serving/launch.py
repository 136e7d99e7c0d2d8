"""The run's model server: start one (or attach to running ones), and have it serve a policy
version.

One class for all: the embedded engine and vLLM (with its middleware, `agl_core.serving.vllm`) say
what they serve, and are given what to serve next, by the same routes.
"""

import logging
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, cast

import httpx

from agl_core import env_var
from agl_core.config import ServingSettings
from agl_core.errors import ConfigError, UpstreamError
from agl_core.ledger import files
from agl_core.ledger.storage import Storage
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.answer_shape import check_answer
from agl_core.scratch import LockedFolder
from agl_core.serving.start import Started, start_engine, start_vllm
from agl_core.serving.vllm.command import check_vllm
from agl_core.serving.weights import weights_digest
from agl_core.types.training import PolicyRef
from agl_core.utils.foreign_requests import is_loopback

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_SECONDS = 600.0


def _with_host(url: str, host: str) -> str:
    """Return the URL with another host and the same port."""
    return str(httpx.URL(url).copy_with(host=host)).rstrip("/")


def check_server(url: str) -> None:
    """Return if a server that serves policies answers at an address.

    Raises:
        UpstreamError: Nothing answers.
        ConfigError: What answers does not serve policies, or is a vLLM whose log-probs are not
            those of the sampling temperature.
    """
    served = ask_server("GET", f"{url.rstrip('/')}/policy", timeout_seconds=30.0)
    mode = served.get("logprobs_mode")
    if served.get("engine") == "vllm" and mode != "processed_logprobs":
        raise ConfigError(
            f"vLLM at {url} gives {mode} as log-probs, training needs those of the sampling "
            "temperature: start it with --logprobs-mode processed_logprobs"
        )


class ModelServer:
    """The model server of a run, or the several that were running; what they serve changes between
    iterations.

    Args:
        urls: Base URLs without `/v1`.
        private: Folder for fetched weights; gone when the server is stopped.
        advertised_host: Name by which other machines reach it; None for that of the URL.
        relaunch: Starts a vLLM with a policy, in place of one that ended; None where a server that
            ends is an error.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        private: LockedFolder,
        advertised_host: str | None = None,
        relaunch: Callable[[PolicyRef], Started] | None = None,
    ) -> None:
        self.urls = urls
        """Base URLs without `/v1`; of a server that was started here, one."""
        self._advertised_host = advertised_host
        self._private = private
        self._relaunch = relaunch
        self._process: Started | None = None
        """Where it was started here."""
        self._current: PolicyRef | None = None
        """What a vLLM serves, with a local path, which must stay."""
        self._kept: tempfile.TemporaryDirectory[str] | None = None
        """Holds that path where it was fetched."""

    @property
    def url(self) -> str:
        """The first of `urls`."""
        return self.urls[0]

    @property
    def advertised_urls(self) -> tuple[str, ...]:
        """The same servers as shards on other machines reach them."""
        host = self._advertised_host
        return tuple(_with_host(url, host) for url in self.urls) if host else self.urls

    @classmethod
    def start(cls, settings: ServingSettings, base: PolicyRef, folder: Path) -> Self:
        """Start a server of the base policy, or attach to those at `settings.urls`.

        Args:
            settings: Where and how to serve.
            base: Policy to begin with; it has a local path.
            folder: Local folder for the log and for fetched weights.

        Raises:
            ConfigError: The server would be open to other machines without a token, or the vLLM
                that is named cannot be used.
            UpstreamError: The server ended or did not answer in time; the message holds the end of
                its log.
        """
        token = env_var.engine_token()
        if not is_loopback(settings.host) and token is None:
            raise ConfigError(
                f"serving.host {settings.host} is open to other machines: set a token in "
                f"{env_var.ENGINE_TOKEN}, here and where shards run"
            )
        for url in settings.urls:
            check_server(url)
        if settings.vllm is not None:
            check_vllm(settings.vllm)
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        # Gone when the server is stopped, or when the next one starts after a killed process.
        private = LockedFolder("engine-", folder)
        if settings.urls:
            return cls(settings.urls, private)
        token_file = private.path / "token" if token else None
        is_vllm = settings.vllm is not None
        launch, log = (start_vllm, "vllm.log") if is_vllm else (start_engine, "engine.log")

        def start(policy: PolicyRef) -> Started:
            if token is None or token_file is None:
                return launch(settings, policy, private.path, folder / log, None)
            token_file.write_text(token.get_secret_value())
            try:
                return launch(settings, policy, private.path, folder / log, token_file)
            finally:
                if not is_vllm:  # each of vLLM's processes reads it for itself, some after others
                    token_file.unlink()

        server = cls((), private, settings.advertised_host, start if is_vllm else None)
        try:
            server._take(start(base), base)
        except BaseException:
            server.stop()
            raise
        return server

    def serve(self, policy: PolicyRef, storage: Storage) -> None:
        """Have every server answer with this policy; returns once they do.

        A vLLM that ended is started again: with this policy, or, where this policy ended it, with
        the one before. Several servers load it side by side; where one fails, the others have it.

        Raises:
            UpstreamError: A server is gone, refuses, or serves other weights than the policy's.
            LedgerError: The policy's files differ from their record.
        """
        behind = self.urls
        if self._is_sound():
            behind = [url for url in self.urls if _identity_at(url) != _identity(policy)]
            if not behind:
                return
        fetched = tempfile.TemporaryDirectory(prefix="policy-", dir=self._private.path)
        try:
            path = policy.path
            if policy.folder is not None:
                path = str(files.fetch_folder(storage, policy.folder, Path(fetched.name)))
            local = PolicyRef(**{**policy.model_dump(), "path": path, "folder": None})
            self._load(local, behind)
        except BaseException:
            fetched.cleanup()
            raise
        if self._relaunch is None:
            fetched.cleanup()
            return
        if self._kept is not None:
            self._kept.cleanup()
        self._kept = fetched

    def _load(self, policy: PolicyRef, urls: Sequence[str]) -> None:
        """Have servers read a policy from its local path."""
        if self._relaunch is not None and not self._is_sound():
            logger.warning("the model server ended; it is started again with %s", policy.version)
            self._take(self._relaunch(policy), policy)
            return
        assert policy.path is not None, "it was fetched"
        if (digest := weights_digest(Path(policy.path))) != policy.weights_digest:
            raise UpstreamError(
                f"{policy.path} holds weights {digest}, expected {policy.weights_digest}"
            )
        try:
            with ThreadPoolExecutor(len(urls)) as pool:
                list(pool.map(lambda url: _load_into(url, policy), urls))
        except UpstreamError as error:
            if self._relaunch is None or self._current is None or self._is_sound():
                raise
            old = self._current
            self._take(self._relaunch(old), old)
            raise UpstreamError(
                f"{policy.version} ended the model server, which was started again with "
                f"{old.version}: {error}"
            ) from error
        self._current = policy

    def _take(self, started: Started, policy: PolicyRef) -> None:
        """Use a server that was started, in place of the one before."""
        if self._process is not None:
            self._process.process.stop()
        self._process, self.urls = started, (started.url,)
        self._current = policy
        if self._relaunch is not None:
            check_server(self.url)
            _check_token_ids(self.url, policy.version)

    def _is_sound(self) -> bool:
        """Whether a vLLM can go on; other servers are asked without asking before."""
        if self._relaunch is None:
            return True
        try:
            ask_server("GET", f"{self.url}/health", expects_json=False)
            ask_server("GET", f"{self.url}/policy")
        except UpstreamError:
            return False
        return True

    def metrics(self) -> dict[str, Any]:
        """Return the counters of an engine of ours, for example `requests_total`."""
        return ask_server("GET", f"{self.url}/metrics")

    def stop(self) -> None:
        """End the server, if it was started here."""
        if self._process is not None:
            self._process.process.stop()
        if self._kept is not None:
            self._kept.cleanup()
        self._private.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _identity(policy: PolicyRef) -> tuple[str, str]:
    return policy.version, policy.weights_digest


def _identity_at(url: str) -> tuple[str, str]:
    """Return version and digest of what a server serves."""
    served = ask_server("GET", f"{url}/policy")
    return served["version"], served["weights_digest"]


def _load_into(url: str, policy: PolicyRef) -> None:
    """Have one server read a policy from its local path; its weights have the policy's digest."""
    body = {
        "version": policy.version,
        "path": policy.path,
        "weights_digest": policy.weights_digest,
    }
    served = ask_server("POST", f"{url}/policy", body)
    if (served["version"], served["weights_digest"]) != _identity(policy):
        raise UpstreamError(
            f"{url} serves {served['version']} with weights {served['weights_digest']}, "
            f"not {policy.version} with weights {policy.weights_digest}"
        )


def _check_token_ids(url: str, version: str) -> None:
    """Return if a vLLM that was started answers with token ids and log-probs."""
    body = {"model": version, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = ask_server("POST", f"{url}/v1/chat/completions", capture.add_recording(body, seed=0))
    if defect := check_answer(answer):
        raise UpstreamError(f"vLLM at {url}: {defect}")
    if defect := capture.find_defect(capture.response_attributes(answer, {})):
        raise ConfigError(f"this vLLM gives nothing to train on: {defect}; install 0.32 or newer")


def ask_server(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    timeout_seconds: float = _LOAD_TIMEOUT_SECONDS,
    *,
    expects_json: bool = True,
) -> dict[str, Any]:
    """Ask a model server and return its answer; {} where none is expected.

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
        raise ConfigError(
            f"{url} is not found: is an engine server running there, or a vLLM with the "
            "middleware of docs/design/serving.md?"
        )
    if answer.status_code == 401:
        raise ConfigError(
            f"model server {url} wants another token: set the one that it was started with in "
            f"{env_var.ENGINE_TOKEN}"
        )
    if answer.is_error:
        raise UpstreamError(f"model server {url} answers HTTP {answer.status_code}: {answer.text}")
    if not expects_json:
        return {}
    try:
        found = answer.json()
    except ValueError as error:
        raise UpstreamError(f"model server {url} answers with something else than JSON") from error
    if not isinstance(found, dict):
        raise UpstreamError(f"model server {url} answers with something else than a JSON object")
    return cast(dict[str, Any], found)
