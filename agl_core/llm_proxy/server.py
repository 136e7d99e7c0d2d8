"""The recording proxy, running in a thread of this process."""

from agl_core.llm_proxy.app import ProxyApp
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.handler import CallSource
from agl_core.types.resources import JsonDict, ProxyLLM
from agl_core.utils.threaded_server import LOOPBACK, ThreadedServer


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
        if host not in LOOPBACK and config.token is None:
            raise ValueError(f"a proxy on {host} needs a token: others can connect there")
        self._proxy = ProxyApp(config, calls)
        super().__init__(self._proxy, host, port)
        self._token = config.token

    def as_resource(self, model: str, sampling_parameters: JsonDict | None = None) -> ProxyLLM:
        """Return the model behind this proxy as a resource for rollouts."""
        return ProxyLLM(
            endpoint=f"{self.url}/v1",
            model=model,
            api_key=self._token or "none",  # OpenAI clients refuse to start without a key
            sampling_parameters=sampling_parameters or {},
        )
