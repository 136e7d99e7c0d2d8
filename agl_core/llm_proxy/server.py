"""The recording proxy, running in a thread of this process."""

from agl_core.llm_proxy.app import ProxyConfig, create_app
from agl_core.tracer.base import Tracer
from agl_core.types.resources import JsonDict, ProxyLLM
from agl_core.utils.threaded_server import LOOPBACK, ThreadedServer


class ProxyServer(ThreadedServer):
    """The recording proxy, running.

    Args:
        config: What it forwards to, and how.
        tracer: Where calls are recorded; its open attempts are the ones that are served.
        host: Address to listen on; any but loopback needs a token in the config.
        port: 0 for a free one.

    Raises:
        ValueError: Other machines could connect, and no token is set.
    """

    def __init__(
        self, config: ProxyConfig, tracer: Tracer, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        if host not in LOOPBACK and config.token is None:
            raise ValueError(f"a proxy on {host} needs a token: others can connect there")
        super().__init__(create_app(config, tracer), host, port)
        self._token = config.token

    def as_resource(self, model: str, sampling_parameters: JsonDict | None = None) -> ProxyLLM:
        """Return the model behind this proxy as a resource for rollouts."""
        return ProxyLLM(
            endpoint=f"{self.url}/v1",
            model=model,
            api_key=self._token or "none",  # OpenAI clients refuse to start without a key
            sampling_parameters=sampling_parameters or {},
        )
