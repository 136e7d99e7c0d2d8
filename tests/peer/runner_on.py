"""A runner of either package, as a process of its own: `python runner_on.py PACKAGE ADDRESS`."""

import asyncio
import importlib
import sys


async def work(package: str, address: str) -> None:
    """Run one rollout of the store at an address, and write how it ended."""
    agl = importlib.import_module(package)

    @agl.rollout
    def agent(task, llm):
        agl.emit_annotation({"labels": ["a", "b"]})
        return 0.5

    store = agl.LightningStoreClient(address)
    runner = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=1, poll_interval=0.1)
    with runner.run_context(agent=agent, store=store):
        await asyncio.wait_for(runner.iter(), 60)
    await store.close()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
