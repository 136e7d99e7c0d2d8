"""The recording proxies of one worker, for rollouts whose resources ask for one (`RecordedLLM`).

    agent --> proxy (this process, loopback) --> model server
                 |
                 +-- the worker's tracer: the call is a span of the attempt, on its way to the store

A proxy is opened by the first rollout that needs it, and serves all of the same resource.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agl_core import env_var
from agl_core.llm_proxy.store_calls import SEED
from agl_core.tracer.base import Tracer
from agl_core.types.core import AttemptedRollout
from agl_core.types.resources import NamedResources, RecordedLLM
from agl_core.types.training import PolicyRef

if TYPE_CHECKING:  # loads a web server, which most runners do not need
    from agl_core.llm_proxy.server import ProxyServer

_MAX_IDLE = 4
"""Proxies that are kept though no rollout uses them: those of the latest resources."""


@dataclass(slots=True)
class _Open:
    """A proxy that runs."""

    server: "ProxyServer"
    seeds: dict[str, int | str]
    """Of the rollouts under way; the proxy looks into it at each call."""
    users: dict[str, str] = field(default_factory=dict[str, str])
    """Rollouts of the attempts under way, by attempt."""


class RecordingProxies:
    """The proxies of one worker.

    Args:
        tracer: Records the calls, in the attempts that are open in it.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, _Open] = {}
        """By resource; the one opened last is last."""
        self._opening = threading.Lock()

    @asynccontextmanager
    async def opened(
        self, rollout: AttemptedRollout, resources: NamedResources
    ) -> AsyncGenerator[NamedResources]:
        """Give the resources of an attempt, those to be recorded behind proxies while it runs.

        Raises:
            ConfigError: A server is named by no URL, or sampling parameters cannot be that.
        """
        recorded = {name: r for name, r in resources.items() if isinstance(r, RecordedLLM)}
        seed = (rollout.metadata or {}).get(SEED)
        attempt_id = rollout.attempt.attempt_id
        used: list[_Open] = []
        given = dict(resources)
        try:
            for name, llm in recorded.items():
                proxy = self._proxy_of(llm)
                proxy.users[attempt_id] = rollout.rollout_id
                used.append(proxy)
                if seed is not None:
                    proxy.seeds[rollout.rollout_id] = seed
                given[name] = proxy.server.as_resource(llm.model, llm.sampling_parameters)
            await self._close_idle()
            yield given
        finally:
            for proxy in used:
                proxy.users.pop(attempt_id, None)  # twice where two resources are alike
                if rollout.rollout_id not in proxy.users.values():
                    proxy.seeds.pop(rollout.rollout_id, None)

    def close(self) -> None:
        """Stop all proxies."""
        while self._open:
            self._open.popitem()[1].server.stop()

    def _proxy_of(self, llm: RecordedLLM) -> _Open:
        """Return the proxy of a resource, which the first call starts."""
        key = llm.model_dump_json()
        with self._opening:
            if key not in self._open:
                self._open[key] = self._start(llm)
            return self._open[key]

    def _start(self, llm: RecordedLLM) -> _Open:
        from agl_core.llm_proxy.backends import Backend
        from agl_core.llm_proxy.config import ProxyConfig
        from agl_core.llm_proxy.server import ProxyServer

        seeds: dict[str, int | str] = {}
        policy = None
        if llm.weights_digest is not None:
            policy = PolicyRef(version=llm.model, weights_digest=llm.weights_digest)
        config = ProxyConfig(
            backends=tuple(
                Backend(url, _key_of(llm), llm.model, llm.upstream_model)
                for url in (llm.endpoint, *llm.further_endpoints)
            ),
            policy=policy,
            rollout_seeds=seeds,
            sampling_parameters=llm.sampling_parameters,
            deadline_seconds=llm.deadline_seconds,
            max_tries=llm.max_tries,
        )
        return _Open(ProxyServer(config, self._tracer).start(), seeds)

    async def _close_idle(self) -> None:
        """Stop the oldest proxies that no attempt uses, beyond those that are kept."""
        idle = [key for key, proxy in self._open.items() if not proxy.users]
        for proxy in [self._open.pop(key) for key in idle[: max(0, len(idle) - _MAX_IDLE)]]:
            await asyncio.to_thread(proxy.server.stop)


def _key_of(llm: RecordedLLM) -> str | None:
    """Return what a server is sent as API key."""
    if llm.api_key is not None or llm.weights_digest is None:
        return llm.api_key
    return env_var.engine_key()
