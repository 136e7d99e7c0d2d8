"""Two runner processes, which meet the algorithm in a store's server."""

import asyncio
import importlib
import logging
import os
import socket
import sys
from typing import Any

from facts import answer, keys, names

agl: Any = importlib.import_module(sys.argv[1])
logging.disable(logging.CRITICAL)
WORKERS = {"Worker-0", "Worker-1"}
RESOURCES = {"prompt": agl.PromptTemplate(template="twice {x}", engine="f-string")}


@agl.prompt_rollout
async def agent(task: Any, prompt_template: Any) -> float:
    agl.emit_annotation({"said": prompt_template.format(x=task), "pid": os.getpid()})
    await asyncio.sleep(0.05)
    if task == 3:
        raise LookupError("no three")
    return 2.0 * task


class Reads(agl.Algorithm):
    """Reads everything that rollouts leave."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        resources = await store.add_resources(self.get_initial_resources())
        ids = []
        for mode, rows in (("train", train_dataset), ("val", val_dataset)):
            for row in rows:
                one = await store.enqueue_rollout(
                    input=row, mode=mode, resources_id=resources.resources_id
                )
                ids.append(one.rollout_id)
        ended: list[Any] = []
        for _ in range(600):
            ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
            if len(ended) == len(ids):
                break
            await asyncio.sleep(0.05)
        by_id = {one.rollout_id: one for one in ended}
        spans = {one: await store.query_spans(one, "latest") for one in ids}
        attempts = [await store.get_latest_attempt(one) for one in ids]
        pids = [s.attributes["pid"] for one in ids for s in spans[one] if "pid" in s.attributes]
        self.found = {
            "statuses": [by_id[one].status for one in ids if one in by_id],
            "modes": [by_id[one].mode for one in ids if one in by_id],
            "rewards": [agl.find_final_reward(spans[one]) for one in ids],
            "spans": sorted(names(spans[ids[0]])),
            "keys": keys(spans[ids[0]]),
            "said": [s.attributes["said"] for s in spans[ids[0]] if "said" in s.attributes],
            "attributed": {s.rollout_id == one for one in ids for s in spans[one]} == {True},
            "elsewhere": os.getpid() not in pids,
            "by workers": {attempt.worker_id for attempt in attempts} <= WORKERS,
            "known workers": {one.worker_id for one in await store.query_workers()} <= WORKERS,
        }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def make(**components: Any) -> Any:
    tracer = agl.OtelTracer()
    return agl.Trainer(
        tracer=tracer,
        runner=agl.LitAgentRunner(tracer, poll_interval=0.05, interval_jitter=0.01),
        algorithm=Reads(),
        initial_resources=RESOURCES,
        **components,
    )


def parts(trainer: Any) -> list[Any]:
    kinds = [type(getattr(trainer, name)).__name__ for name in ("strategy", "store")]
    return [*kinds, trainer.n_runners, trainer.strategy.n_runners]


port = free_port()
trainer = make(strategy={"type": "cs", "n_runners": 2}, port=port)
trainer.fit(agent, train_dataset=[1, 2, 3, 4, 5, 6], val_dataset=[7, 8])
strategy = agl.ClientServerExecutionStrategy(n_runners=2, server_port=port)
answer(
    {
        "fit": trainer.algorithm.found,
        "dict": parts(trainer),
        "instance": parts(make(strategy=strategy)),
        "name": parts(make(strategy="cs", n_runners=2, port=port)),
        "default": parts(make(n_runners=2, port=port)),
        "class": parts(make(strategy=agl.ClientServerExecutionStrategy)),
        "port": [trainer.strategy.server_port == port, trainer.strategy.role],
    }
)
