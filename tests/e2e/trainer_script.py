"""The calculator trained by a Trainer, as a user's script: which algorithm and strategy it is told.

python -m tests.e2e.trainer_script settings.json
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import agl_core as agl
from agl_core.dataset import read_jsonl
from agl_core.types.core import EnqueueRolloutRequest, RolloutConfig
from examples.calculator.agent import calculator as ask_and_judge
from tests.algorithms import OddRows

calculator = agl.rollout(ask_and_judge)
DATA = Path("examples/calculator/data")
NUM_ROWS = 8


def rows(name: str) -> list[Any]:
    return [json.loads(row) for row in read_jsonl(str(DATA / f"{name}.jsonl"))[:NUM_ROWS]]


class MeanReward(agl.Algorithm):
    """A user's own: enqueues every row, waits, and reads what the runners left."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store, adapter = self.get_store(), self.get_adapter()
        resources = self.get_initial_resources()
        assert resources is not None
        update = await store.add_resources(resources)
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=update.resources_id,
                config=RolloutConfig(timeout_seconds=60),
            )
            for task in train_dataset
        ]
        ids = [r.rollout_id for r in await store.enqueue_many_rollouts(requests)]
        async with asyncio.timeout(120):
            done: list[Any] = []
            while len(done) < len(ids):
                done = await store.wait_for_rollouts(rollout_ids=ids, timeout=5.0)
        found = [await store.query_spans(rollout_id, "latest") for rollout_id in ids]
        triplets = sum(len(adapter.adapt(spans)) for spans in found)
        rewards = [agl.find_final_reward(spans) for spans in found]
        sys.stdout.write(
            json.dumps({"statuses": [r.status for r in done], "rewards": rewards, "n": triplets})
            + "\n"
        )


def algorithm_of(settings: dict[str, Any]) -> agl.Algorithm:
    kind = settings["algorithm"]
    if kind == "verl":
        run = {"run_id": "mine", "ledger": settings["ledger"]}
        return agl.VERL(settings["verl"], run=run | {"serving": {"url": settings["engine"]}})
    if kind == "iterative":
        algorithm = OddRows("examples/calculator/policy")
        algorithm.run_settings = {
            "run_id": "mine",
            "ledger": settings["ledger"],
            "serving": {"url": settings["engine"]},
        }
        return algorithm
    return agl.Baseline(span_verbosity="none") if kind == "baseline" else MeanReward()


def main(settings: dict[str, Any]) -> None:
    llm = agl.LLM(
        endpoint=f"{settings['engine']}/v1",
        model=settings["model"],
        sampling_parameters={
            "temperature": 1.0,
            "max_tokens": 16,
            "extra_body": {"return_token_ids": True},
        },
    )
    algorithm = algorithm_of(settings)
    store = settings.get("store")
    serves_itself = settings["algorithm"] in ("verl", "iterative")
    in_runners = settings.get("in_runners")
    trainer = agl.Trainer(
        algorithm=algorithm,
        llm_proxy=agl.LLMProxy(launch_mode="runner") if in_runners else None,
        strategy=settings["strategy"],
        initial_resources=None if serves_itself else {"main_llm": llm},
        store=None if store is None else agl.LightningStoreClient(store),
    )
    trainer.fit(calculator, rows("train"), val_dataset=rows("val"))
    if isinstance(algorithm, agl.Baseline) and algorithm.summary:
        summary = {mode: dict(found.ends) for mode, found in algorithm.summary.items()}
        sys.stdout.write(
            json.dumps({"summary": summary, "rewards": algorithm.summary["train"].rewards}) + "\n"
        )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
