"""The recording proxy, running in a thread of this process."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from agl_core.llm_proxy.app import ProxyApp
from agl_core.llm_proxy.backends import Backend
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.handler import CallSource
from agl_core.types.resources import JsonDict, ProxyLLM
from agl_core.utils.foreign_requests import is_loopback
from agl_core.utils.threaded_server import ThreadedServer


class ProxyServer(ThreadedServer):
    """The recording proxy, running.

    Args:
        config: What it forwards to, and how.
        calls: Where they are recorded; of a tracer, its open attempts are served.
        host: Address to listen on; any but loopback needs a token in the config.
        port: 0 for a free one.

    Raises:
        ValueError: Other machines could connect, and no token is set.
    """

    def __init__(
        self, config: ProxyConfig, calls: CallSource, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        if not is_loopback(host) and config.token is None:
            raise ValueError(f"a proxy on {host} needs a token: others can connect there")
        self._proxy = ProxyApp(config, calls, closes_connections=is_loopback(host))
        super().__init__(self._proxy, host, port)
        self._token = config.token

    def as_resource(
        self, model: str, sampling_parameters: JsonDict | None = None, mode: str | None = None
    ) -> ProxyLLM:
        """Return the model behind this proxy as a resource for rollouts.

        Args:
            model: The name to ask for.
            sampling_parameters: What agents are told to send.
            mode: Of the rollouts; their calls get the proxy's sampling parameters of that mode.
        """
        prefix = f"/mode/{mode}" if mode else ""
        return ProxyLLM(
            endpoint=f"{self.url}{prefix}/v1",
            model=model,
            api_key=self._token or "none",  # OpenAI clients refuse to start without a key
            sampling_parameters=sampling_parameters or {},
        )

    def replace_backends(self, backends: Sequence[Backend]) -> None:
        """Send calls to these model servers from now on, also further tries of calls under way.

        Raises:
            ConfigError: There is none.
        """
        self._proxy.backends.replace(backends)

    @contextmanager
    def paused(
        self, drain_seconds: float = 60.0, retry_after_seconds: float = 1.0
    ) -> Generator[None]:
        """Let no calls in while the block runs, which begins when none is served any more.

        Calls are answered 429 meanwhile, with a Retry-After, which clients follow.

        Args:
            drain_seconds: How long calls under way may take, streams to their end.
            retry_after_seconds: What refused calls are told.

        Raises:
            TransientError: They did not end in time; calls are let in again.
        """
        gate = self._proxy.gate
        gate.close(retry_after_seconds)
        try:
            gate.wait_until_empty(drain_seconds)
            yield
        finally:
            gate.open()

    def usage(self, rollout_id: str | None = None) -> dict[str, Any]:
        """Return calls, tokens and cost of a rollout, or of all; the last 10,000 are known."""
        return self._proxy.accounts.usage(rollout_id)
