"""What an update costs around VERL's own calls, and at both levels of aggregation.

python -m benchmarks.update [--large FOLDER]

Our share is the time of a whole update, from the batch table to its tables, less the time inside
VERL: forward passes, optimizer steps, estimator. The second part updates on rollouts of growing
turns, once as rows of one call each and once as whole trajectories.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from agl_core.algorithm.verl import advantage
from agl_core.algorithm.verl.batch import read_rows
from agl_core.algorithm.verl.config import compose
from agl_core.algorithm.verl.platform_cpu import quiet_imports
from agl_core.algorithm.verl.settings import batch_settings
from agl_core.algorithm.verl.update import learn
from agl_core.algorithm.verl.worker import UpdateWorker
from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.batch import build_batch
from tests.builders import make_triplets

TOKENIZER = Path(__file__).parent.parent / "examples" / "calculator" / "policy"
REPEATS = 2
TURNS, PROMPT, RESPONSE = 8, 64, 32
"""Calls of a rollout, ids of its first prompt and of each later observation, ids of a response."""


def configuration(rows: int, micro_batch_size: int, *, level: str = "transition") -> Any:
    """Return GRPO with one optimizer step."""
    return compose(
        {
            "data.train_batch_size": rows,
            "data.max_prompt_length": 4096,
            "data.max_response_length": 4096,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": rows,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro_batch_size,
            "algorithm.adv_estimator": "grpo",
            "trainer.total_training_steps": 100,
            "agentlightning.trace_aggregator.level": level,
        }
    )


def make_policy(folder: Path, **sizes: int) -> Path:
    """Write a random Llama with the calculator's tokenizer."""
    with quiet_imports():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **sizes)).save_pretrained(folder)
    for path in TOKENIZER.glob("tokenizer*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def make_rows(rows: int, prompt: int, response: int) -> pa.Table:
    """Return rows of equal length in groups of four."""
    ids = np.random.default_rng(0).integers(3, 97, size=(rows, prompt + response))
    return pa.Table.from_pylist(
        [
            {
                "row": k,
                "index": k,
                "rollout_id": f"ro-{k}",
                "group": k // 4,
                "call_index": 0,
                "step": 0,
                "num_calls": 1,
                "prompt_ids": ids[k, :prompt].tolist(),
                "response_ids": ids[k, prompt:].tolist(),
                "response_mask": [1] * response,
                "rollout_logprobs": [-4.5] * response,
                "token_rewards": [0.0] * (response - 1) + [float(k % 2)],
                "reward": float(k % 2),
                "rollout_reward": float(k % 2),
            }
            for k in range(rows)
        ],
        schema=BATCH_ROWS,
    )


@contextmanager
def timed(owner: Any, name: str, spent: list[float]) -> Generator[None]:
    """Add up the time of a function's calls."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - started)

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)


def time_update(worker: UpdateWorker, config: Any, table: pa.Table) -> tuple[float, float]:
    """Return the seconds of a whole update, and of VERL's part in it."""
    spent: list[float] = []
    verl_worker = worker._actor.worker  # pyright: ignore[reportPrivateUsage] measured from within
    settings = batch_settings(config, 2)
    with (
        timed(verl_worker, "infer_batch", spent),
        timed(verl_worker, "train_batch", spent),
        timed(advantage, "_of_units", spent),
    ):
        started = time.perf_counter()
        learn(worker, read_rows(table), config, settings, step=0, kl_coefficient=0.0)
        total = time.perf_counter() - started
    return total, sum(spent)


def print_share(name: str, policy: Path, config: Any, table: pa.Table) -> None:
    """Print the median share of our code over a few updates, after one to warm up."""
    worker = UpdateWorker(config, policy, total_steps=100)
    time_update(worker, config, table)
    runs = [time_update(worker, config, table) for _ in range(REPEATS)]
    worker.close()
    share = median((total - verl) / total for total, verl in runs)
    total = median(total for total, _ in runs)
    print(f"{name}: {total:7.2f} s an update, {100 * share:5.2f} % of it ours")


def growing_turns(rollouts: int) -> pa.Table:
    """Return the triplets of rollouts in which each prompt is all that came before, and more."""
    rng = np.random.default_rng(0)
    calls = []
    for index in range(rollouts):
        context: list[int] = []
        for call in range(TURNS):
            context = context + rng.integers(3, 97, PROMPT).tolist()
            response = rng.integers(3, 97, RESPONSE).tolist()
            calls.append(
                {
                    "index": index,
                    "group": index // 4,
                    "call_index": call,
                    "prompt_ids": context,
                    "response_ids": response,
                    "logprobs": [-4.5] * RESPONSE,
                    "reward": float(index % 2),
                }
            )
            context = context + response
    return make_triplets(*calls)


def print_levels(policy: Path, rollouts: int) -> None:
    """Print tokens and time of one update at both levels."""
    triplets = growing_turns(rollouts)
    seconds, tokens = {}, {}
    for level in ("transition", "trajectory"):
        config = configuration(rollouts, 8, level=level)
        rows = build_batch(triplets, batch_settings(config, 2)).rows
        tokens[level] = sum(
            len(rows[name].combine_chunks().flatten()) for name in ("prompt_ids", "response_ids")
        )
        worker = UpdateWorker(config, policy, total_steps=100)
        time_update(worker, config, rows)
        seconds[level] = median(time_update(worker, config, rows)[0] for _ in range(REPEATS))
        worker.close()
        print(
            f"{rollouts} rollouts of {TURNS} growing turns, {level:10}: {len(rows):4} rows, "
            f"{tokens[level]:6} tokens, {seconds[level]:6.2f} s an update"
        )
    print(
        f"per call to whole trajectories: {tokens['transition'] / tokens['trajectory']:.2f} times "
        f"the tokens, {seconds['transition'] / seconds['trajectory']:.2f} times the time"
    )


def main() -> None:
    """Print shares and ratios."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--large", type=Path, help="Folder of a model; else a random 135M one.")
    large = options.parse_args().large
    with tempfile.TemporaryDirectory() as name:
        tiny = make_policy(
            Path(name) / "tiny",
            vocab_size=99,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        print_share(
            "tiny policy, 512 rows of 24+16", tiny, configuration(512, 64), make_rows(512, 24, 16)
        )
        print_levels(tiny, rollouts=8)
        large = large or make_policy(
            Path(name) / "large",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
        )
        print_share(
            "135M policy, 8 rows of 64+32", large, configuration(8, 8), make_rows(8, 64, 32)
        )


if __name__ == "__main__":
    main()
