"""A tracer for agents that use AgentOps' decorators; it needs no account and no network.

AgentOps' SDK (the extra `agentops`) records by OpenTelemetry's global API. Here it is told that it
is set up, without its exporters, so that its spans go to the attempt that they are in.
"""

import importlib
import importlib.util
import threading
from functools import partial
from typing import Any

from agl_core.store.base import LightningStore
from agl_core.tracer.otel import OtelTracer


class AgentOpsTracer(OtelTracer):
    """Record as `OtelTracer` does, and what AgentOps' decorators mark where it is installed.

    Args:
        agentops_managed: Whether the tracer sets AgentOps up, unless somebody did before.
        instrument_managed: Whether the calls of OpenAI clients are recorded.
        daemon: Accepted for agents written for Agent Lightning; no process is started here.
        max_spans_per_attempt: Further spans are dropped and counted.
    """

    def __init__(
        self,
        *,
        agentops_managed: bool = True,
        instrument_managed: bool = True,
        daemon: bool = True,
        max_spans_per_attempt: int = 10_000,
    ) -> None:
        super().__init__(
            max_spans_per_attempt=max_spans_per_attempt, instrument_openai=instrument_managed
        )
        del daemon
        self.agentops_managed = agentops_managed

    def __reduce__(self) -> Any:
        """Start afresh in another process, with the same settings."""
        settings = {
            "agentops_managed": self.agentops_managed,
            "instrument_managed": self.instrument_openai,
            "max_spans_per_attempt": self.max_spans_per_attempt,
        }
        return partial(type(self), **settings), ()

    def init_worker(
        self, worker_id: int, store: LightningStore | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Set up in one worker: as `OtelTracer`, and AgentOps.

        Args:
            worker_id: Number of the worker, from 0.
            store: Where attempts go whose `trace_context` names no other.
            args: Not used.
            kwargs: Not used.
        """
        super().init_worker(worker_id, store, *args, **kwargs)
        if self.agentops_managed:
            _enable_sdk()

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""
        if self.agentops_managed:
            _disable_sdk()
        super().teardown_worker(worker_id, *args, **kwargs)


_lock = threading.Lock()
_num_enabled = 0


def _enable_sdk() -> None:
    """Let AgentOps' decorators make spans."""
    global _num_enabled
    sdk = _find_sdk()
    with _lock:
        # One that the user set up himself, with a provider, stays his.
        if sdk is not None and (_num_enabled or not sdk.initialized):
            sdk._initialized = True
            _num_enabled += 1


def _disable_sdk() -> None:
    """Undo one `_enable_sdk`."""
    global _num_enabled
    sdk = _find_sdk()
    with _lock:
        if sdk is None or not _num_enabled:
            return
        _num_enabled -= 1
        if not _num_enabled:
            sdk._initialized = False


def _find_sdk() -> Any:
    """Return AgentOps' global tracer, or None where AgentOps is not installed."""
    if importlib.util.find_spec("agentops") is None:
        return None
    return importlib.import_module("agentops.sdk.core").tracer
