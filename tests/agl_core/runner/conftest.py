"""A store, in memory and on disk, and a runner that works for it."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agl_core.litagent import LitAgent, as_agent
from agl_core.runner import LitAgentRunner
from agl_core.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agl_core.tracer import OtelTracer
from agl_core.types.resources import LLM, PromptTemplate

StartRunner = Callable[..., LitAgentRunner[Any]]

RESOURCES = {
    "main_llm": LLM(endpoint="http://127.0.0.1:1/v1", model="m"),
    "prompt": PromptTemplate(template="{question}"),
}


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[LightningStore]:
    opened = (
        InMemoryLightningStore()
        if request.param == "memory"
        else SqliteLightningStore(tmp_path / "store.db")
    )
    yield opened
    await opened.close()


@pytest.fixture
def start_runner(store: LightningStore) -> Iterator[StartRunner]:
    """Set up a runner of an agent, or a function, until the test ends."""
    with ExitStack() as stack:

        def start(agent: LitAgent[Any] | Callable[..., Any], **options: Any) -> LitAgentRunner[Any]:
            context = {name: options.pop(name) for name in ("hooks", "worker_id") & options.keys()}
            settings = {"poll_interval": 0.02, "interval_jitter": 0.0, "heartbeat_interval": 0.1}
            tracer = options.pop("tracer", None) or OtelTracer()
            runner = LitAgentRunner[Any](tracer, **settings | options)
            return stack.enter_context(
                runner.run_context(agent=as_agent(agent), store=store, **context)
            )

        yield start
