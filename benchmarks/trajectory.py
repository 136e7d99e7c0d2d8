"""How many tokens a second of CPU time become batch rows at both levels, that the time grows with
the tokens only, and what whole trajectories save.

python -m benchmarks.trajectory
"""

import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from agl_core.ledger.tables import TRIPLETS
from agl_core.trajectory.batch import Batch, build_batch
from agl_core.trajectory.ragged import Ragged, ranges
from agl_core.trajectory.settings import BatchSettings

TURNS = 8
PROMPT, RESPONSE, OBSERVATION = 200, 100, 50
"""Tokens of the first prompt, of each answer, and of what the tools add to each later prompt."""


def make_triplets(rollouts: int, turns: int = TURNS, *, broken: bool = False) -> pa.Table:
    """Return the calls of some rollouts, each prompt being all of the conversation so far.

    Args:
        rollouts: How many.
        turns: Calls of each.
        broken: Whether every answer comes back with another first token.
    """
    step = RESPONSE + OBSERVATION
    whole = np.random.default_rng(1).integers(1000, size=(rollouts, PROMPT + turns * step))
    whole = whole.astype(np.int32)
    prompts, lengths = [], PROMPT + np.arange(turns) * step
    for conversation in whole:
        for turn, length in enumerate(lengths):
            prompt = conversation[:length]
            if broken and turn:
                prompt = prompt.copy()
                prompt[lengths[turn - 1]] += 1000
            prompts.append(prompt)
    rows = rollouts * turns
    answers = whole.ravel()[
        ranges(
            (np.arange(rollouts)[:, None] * whole.shape[1] + lengths).ravel(),
            np.full(rows, RESPONSE),
        )
    ]
    prompt_lists = Ragged(np.concatenate(prompts), np.tile(lengths, rollouts))
    answer_lengths = np.full(rows, RESPONSE)
    index = np.repeat(np.arange(rollouts), turns)
    columns = {
        "index": index,
        "rollout_id": [f"ro-{i}" for i in index],
        "group": index // 8,
        "call_index": np.tile(np.arange(turns), rollouts),
        "prompt_ids": prompt_lists.to_arrow(),
        "response_ids": Ragged(answers, answer_lengths).to_arrow(),
        "logprobs": Ragged(np.full(len(answers), -0.5, np.float32), answer_lengths).to_arrow(),
        "reward": np.ones(rows),
        "policy_version": ["v000000"] * rows,
        "temperature": np.ones(rows),
    }
    return pa.table(
        {f.name: pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(rows, f.type)
         for f in TRIPLETS},
        schema=TRIPLETS,
    )  # fmt: skip


def build(triplets: pa.Table, level: str) -> tuple[Batch, float]:
    """Return the batch of some triplets and the seconds of CPU time that it took."""
    limits = {"max_prompt_length": 1 << 20, "max_response_length": 1 << 20, "temperature": 1.0}
    settings = BatchSettings.model_validate({"level": level, **limits})
    started = time.process_time()
    batch = build_batch(triplets, settings)
    return batch, time.process_time() - started


def num_tokens(table: pa.Table, columns: Sequence[str]) -> int:
    """Return the tokens of some list columns."""
    return sum(len(table[name].combine_chunks().flatten()) for name in columns)


def time_levels() -> None:
    """Print the rates of both levels for growing inputs."""
    for rollouts in (250, 500, 1000, 2000):
        for name, broken in (("joined", False), ("broken", True)):
            triplets = make_triplets(rollouts, broken=broken)
            tokens = num_tokens(triplets, ["prompt_ids", "response_ids"])
            rates = {}
            for level in ("transition", "trajectory"):
                _, seconds = build(triplets, level)
                rates[level] = tokens / seconds / 1e6
            print(
                f"{rollouts:5} rollouts of {TURNS} {name} turns, {tokens / 1e6:5.1f} M tokens: "
                f"transition {rates['transition']:6.1f} M tokens/s, "
                f"trajectory {rates['trajectory']:6.1f} M tokens/s"
            )


def time_long_rollout() -> None:
    """Print the rate for one rollout of very many calls, which a pairwise search would not take."""
    for turns in (125, 250, 500):
        triplets = make_triplets(1, turns)
        tokens = num_tokens(triplets, ["prompt_ids", "response_ids"])
        batch, seconds = build(triplets, "trajectory")
        assert len(batch.rows) == 1
        print(
            f"one rollout of {turns:4} turns, {tokens / 1e6:5.1f} M tokens: {seconds:6.2f} s, "
            f"{tokens / seconds / 1e6:6.1f} M tokens/s"
        )


def compare_levels() -> None:
    """Print the tokens that an update goes through at each level, beside the least possible."""
    triplets = make_triplets(8)
    least = PROMPT + TURNS * RESPONSE + (TURNS - 1) * OBSERVATION
    counts = {}
    for level in ("transition", "trajectory"):
        batch, _ = build(triplets, level)
        counts[level] = num_tokens(batch.rows, ["prompt_ids", "response_ids"]) / 8
        print(
            f"{level:10}: {len(batch.rows) / 8:.0f} rows and {counts[level]:.0f} tokens a rollout, "
            f"{batch.tokens.trained / 8:.0f} with loss weight"
        )
    assert counts["trajectory"] == least
    print(f"least possible {least}; ratio {counts['transition'] / counts['trajectory']:.2f}")


def main() -> None:
    """Print rates for growing inputs (a constant rate is linear growth), then the saving."""
    time_levels()
    time_long_rollout()
    compare_levels()


if __name__ == "__main__":
    main()
