"""`LLMProxy`, as Agent Lightning 0.3 names it: the recording proxy before a store.

Its constructor takes LiteLLM's `model_list`, of which `hosted_vllm/` and `openai/` models are
served. What concerned LiteLLM alone is refused where it would change something.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agl_core.errors import ConfigError
from agl_core.llm_proxy.backends import Backend
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.server import ProxyServer
from agl_core.llm_proxy.store_calls import StoreCalls
from agl_core.store.base import LightningStore
from agl_core.types.resources import LLM, JsonDict, ProxyLLM, RecordedLLM
from agl_core.types.training import PolicyRef

_PROVIDERS = ("hosted_vllm/", "openai/")
_BUILT_IN = {
    "middlewares": {"rollout_attempt", "stream_conversion"},
    "callbacks": {"return_token_ids", "opentelemetry", "logprobs"},
}
_LAUNCH_MODES = ("mp", "thread", "asyncio", "runner")
_PARAMETERS = {"model", "api_base", "api_key"}
_STOP_SECONDS = 40.0
"""The proxy sends what is recorded for up to 30 s when it ends."""


class LLMProxy:
    """The recording proxy of an algorithm: agents anywhere call through it, a store has the spans.

    Args:
        port: None for a free one.
        model_list: LiteLLM's: `model_name` and `litellm_params` with `model`, `api_base` and
            perhaps `api_key`. Entries of one name share its load.
        store: Where calls are recorded; to be set before the start.
        host: Address to listen on; None for loopback.
        litellm_config: Only `litellm_settings.num_retries` is known.
        num_retries: Tries of a call after the first one.
        num_workers: One.
        launch_mode: "runner" has each runner record its own calls, by a proxy in its process;
            nothing listens here then, and the resource is a `RecordedLLM`. Agent Lightning's three
            are accepted: the proxy runs in a thread.
        launcher_args: None: what it held are arguments here.
        middlewares: The names of Agent Lightning's; what they did is built in.
        callbacks: The same.
        token: What agents must send as their API key; needed where others can connect.

    Raises:
        ValueError: A value that cannot be honoured.
    """

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[dict[str, Any]] | None = None,
        store: LightningStore | None = None,
        host: str | None = None,
        litellm_config: dict[str, Any] | None = None,
        num_retries: int = 0,
        num_workers: int = 1,
        launch_mode: str = "mp",
        launcher_args: Any = None,
        middlewares: Sequence[str] | None = None,
        callbacks: Sequence[str] | None = None,
        *,
        token: str | None = None,
    ) -> None:
        if launcher_args is not None:
            raise ConfigError("launcher_args is not supported; give host and port")
        if num_workers != 1:
            raise ConfigError(f"num_workers={num_workers} is not supported: it is one thread")
        if launch_mode not in _LAUNCH_MODES:
            raise ConfigError(
                f"Unsupported launch mode: {launch_mode}: launch_mode {launch_mode!r} is none of "
                f"{', '.join(_LAUNCH_MODES)}"
            )
        for name, values in (("middlewares", middlewares), ("callbacks", callbacks)):
            if others := [value for value in values or () if value not in _BUILT_IN[name]]:
                raise ConfigError(
                    f"Invalid {name.removesuffix('s')} alias: {others[0]!r}: "
                    f"{name} {others[0]!r} is not supported. Available aliases are: "
                    f"{', '.join(sorted(_BUILT_IN[name]))}"
                )
        self._in_runners = launch_mode == "runner"
        if self._in_runners and (host or port or token):
            raise ConfigError(
                "launch_mode='runner' listens in the runners, on loopback: leave out host, port "
                "and token"
            )
        self._is_announced = False
        """Whether resources may be asked for, where the runners serve them."""
        self._host = host or "127.0.0.1"
        self._port = port or 0
        self._models = list(model_list or ())
        self._backends = _to_backends(self._models)
        self._store = store
        self._num_retries = _num_retries(litellm_config or {}, num_retries)
        self._token = token
        self._server: ProxyServer | None = None
        self._calls: StoreCalls | None = None

    def get_store(self) -> LightningStore | None:
        """Return where calls are recorded."""
        return self._store

    def set_store(self, store: LightningStore | None) -> None:
        """Set where calls are recorded, from the next start on."""
        self._store = store

    def update_model_list(self, model_list: Sequence[dict[str, Any]]) -> None:
        """Send calls to these models from now on, also while the proxy runs. Where the runners
        record, a resource that is published names its servers; `as_resource` makes another one.

        Raises:
            ValueError: An entry that is not supported, or none.
        """
        self._models, self._backends = list(model_list), _to_backends(model_list)
        if self._server is not None:
            self._server.replace_backends(self._backends)

    def is_running(self) -> bool:
        """Say whether calls are served, here or by runners."""
        return self._server is not None or self._is_announced

    async def start(self) -> None:
        """Listen, and return once calls are served.

        Raises:
            ValueError: There is no store or no model, or others could connect without a token.
            OSError: The address cannot be used.
        """
        if self.is_running():
            return
        if self._in_runners:
            self._is_announced = True
            return
        await self._start(
            ProxyConfig(
                backends=tuple(self._backends), max_tries=1 + self._num_retries, token=self._token
            )
        )

    async def _start(self, config: ProxyConfig, *, reads_seeds: bool = False) -> ProxyServer:
        if self._store is None:
            raise ConfigError(
                "Store is not set. Please set the store before starting the "
                "LLMProxy: the proxy has no store to record calls in; set_store comes first"
            )
        calls = StoreCalls(self._store, reads_seeds=reads_seeds)
        server = ProxyServer(config, calls, self._host, self._port)
        await asyncio.to_thread(server.start)
        self._server, self._calls = server, calls
        return server

    @asynccontextmanager
    async def serving(
        self,
        backends: Sequence[Backend],
        policy: PolicyRef,
        sampling_parameters: JsonDict,
        deadline_seconds: float,
    ) -> AsyncGenerator[ProxyLLM | RecordedLLM]:
        """Serve one policy while the block runs, and nothing else.

        Calls that other weights answer are refused. Calls are seeded by what the metadata of their
        rollout in the store says (`agl_seed`). Where the proxy ran before, it runs again
        afterwards. Runners that record calls themselves take the servers' key from their
        environment.

        Args:
            backends: The model servers.
            policy: What they must serve.
            sampling_parameters: For what agents leave open.
            deadline_seconds: For one call, retries included.
        """
        if self._in_runners:
            yield RecordedLLM(
                endpoint=backends[0].url,
                further_endpoints=tuple(backend.url for backend in backends[1:]),
                model=policy.version,
                weights_digest=policy.weights_digest,
                sampling_parameters=sampling_parameters,
                deadline_seconds=deadline_seconds,
            )
            return
        was_running = self.is_running()
        await self.stop()
        config = ProxyConfig(
            backends=tuple(backends),
            policy=policy,
            sampling_parameters=sampling_parameters,
            deadline_seconds=deadline_seconds,
            token=self._token,
        )
        server = await self._start(config, reads_seeds=True)
        try:
            yield server.as_resource(policy.version, sampling_parameters)
        finally:
            await self.stop()
            if was_running:
                await self.start()

    async def flush(self, deadline_seconds: float = 30.0) -> None:
        """Return once every call that has ended is in the store; at once where none is served here:
        runners store their calls before they end an attempt.

        Raises:
            TransientError: The store did not take them before the deadline.
        """
        if self._calls is not None:
            await self._calls.flush(deadline_seconds)

    async def stop(self) -> None:
        """Stop serving; what is recorded is sent to the store first, for up to 30 s."""
        self._is_announced = False
        server, self._server, self._calls = self._server, None, None
        if server is not None:
            await asyncio.to_thread(server.stop, _STOP_SECONDS)

    async def restart(self) -> None:
        """Stop and start; a port that was chosen is another one then."""
        await self.stop()
        await self.start()

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: JsonDict | None = None,
    ) -> LLM:
        """Return the model as a resource: for any rollout, or for one attempt.

        Args:
            rollout_id: The rollout, or None (with `attempt_id` None) for any.
            attempt_id: The attempt of that rollout.
            model: Its name; None where all models have the same.
            sampling_parameters: What agents are told to send.

        Raises:
            ValueError: Only one id is given, or the model is not clear.
            RuntimeError: The proxy does not run.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError(
                "Either rollout_id and attempt_id must be provided, or neither: "
                "rollout_id and attempt_id must be given together or not at all"
            )
        if not self.is_running():
            raise RuntimeError("the proxy is not running; call start() first")
        if model is None:
            names = sorted({str(entry["model_name"]) for entry in self._models})
            if len(names) != 1:
                raise ConfigError(
                    (
                        "Multiple models found in model_list"
                        if names
                        else "No models found in model_list"
                    )
                    + f". Please specify the model: which model? there are: {', '.join(names)}"
                )
            model = names[0]
        if self._server is None:
            if rollout_id is not None:
                raise ConfigError(
                    "calls are recorded by the runners, so an attempt has no address before it "
                    "runs: leave out rollout_id and attempt_id"
                )
            return self._recorded(model, sampling_parameters)
        resource: ProxyLLM = self._server.as_resource(model, sampling_parameters)
        if rollout_id is None or attempt_id is None:
            return resource
        return LLM(
            endpoint=resource.get_base_url(rollout_id, attempt_id),
            model=model,
            api_key=resource.api_key,
            sampling_parameters=resource.sampling_parameters,
        )

    def _recorded(self, model: str, sampling_parameters: JsonDict | None) -> RecordedLLM:
        """Return the servers of a model as a resource that runners open.

        Raises:
            ConfigError: There is none, or they have several keys or names for it.
        """
        servers = [backend for backend in self._backends if backend.model == model]
        if not servers:
            raise ConfigError(f"no model server has {model!r}")
        first = servers[0]
        if any(
            (one.api_key, one.upstream_model) != (first.api_key, first.upstream_model)
            for one in servers
        ):
            raise ConfigError(
                f"model {model}: with launch_mode='runner' its servers have one api_key and one "
                "name for it"
            )
        return RecordedLLM(
            endpoint=first.url,
            further_endpoints=tuple(one.url for one in servers[1:]),
            model=model,
            upstream_model=first.upstream_model,
            api_key=first.api_key,
            sampling_parameters=sampling_parameters or {},
            max_tries=1 + self._num_retries,
        )


def _to_backends(model_list: Sequence[dict[str, Any]]) -> list[Backend]:
    """Return LiteLLM's model list as model servers."""
    backends: list[Backend] = []
    for entry in model_list:
        parameters = entry.get("litellm_params") or {}
        name, model, url = (
            entry.get("model_name"),
            parameters.get("model"),
            parameters.get("api_base"),
        )
        if not name or not model or not url:
            raise ConfigError(
                f"model {name or 'without a name'}: it needs model_name, litellm_params.model and "
                "litellm_params.api_base"
            )
        if others := sorted(parameters.keys() - _PARAMETERS):
            raise ConfigError(f"model {name}: litellm_params.{others[0]} is not supported")
        provider = next((prefix for prefix in _PROVIDERS if model.startswith(prefix)), None)
        if provider is None:
            raise ConfigError(
                f"model {name}: {model!r} does not begin with {' or '.join(_PROVIDERS)}"
            )
        backends.append(Backend(url, parameters.get("api_key"), name, model.removeprefix(provider)))
    return backends


def _num_retries(litellm_config: dict[str, Any], num_retries: int) -> int:
    settings = {**(litellm_config.get("litellm_settings") or {})}
    configured = settings.pop("num_retries", num_retries)
    others = [name for name in litellm_config if name != "litellm_settings"] + list(settings)
    if others:
        raise ConfigError(f"litellm_config: {others[0]} is not supported")
    return configured
