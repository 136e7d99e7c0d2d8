"""Runners in threads of the test's process, each with an event loop of its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from agl_core.litagent import as_agent
from agl_core.runner import LitAgentRunner
from agl_core.store import LightningStore
from agl_core.tracer import OtelTracer


@asynccontextmanager
async def running(
    store: LightningStore, agent: Any, *, runners: int = 1, **options: Any
) -> AsyncGenerator[None]:
    """Have runners work for the store while the block runs."""
    stop = threading.Event()

    async def work(number: int) -> None:
        settings = {"poll_interval": 0.02, "interval_jitter": 0.0, "concurrency": 8}
        settings["heartbeat_interval"] = 0.1  # so that a cancelled agent is stopped soon
        runner = LitAgentRunner[Any](OtelTracer(), **settings | options)
        with runner.run_context(agent=as_agent(agent), store=store, worker_id=number):
            await runner.iter(event=stop)

    threads = [
        threading.Thread(target=asyncio.run, args=(work(number),)) for number in range(runners)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            await asyncio.to_thread(thread.join, 20.0)
            assert not thread.is_alive(), "a runner did not stop"
