"""Small runs for the chaos test, and what they must give."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from agl_core.config import RolloutSettings, RunConfig
from agl_core.failures import FailureSettings
from tests.chaos.agents import Plan
from tests.conftest import small_run

MAX_ATTEMPTS = 3


def chaos_config(engine_url: str, ledger: str, run_id: str, **overrides: Any) -> RunConfig:
    """Return 2 iterations of 4 x 4 rollouts and 4 to validate, with short deadlines."""
    rollout = {
        "timeout_seconds": 4.0,
        "flush_rollouts": 4,
        "concurrency": 8,
        "max_leaked_threads": 64,
    } | overrides.pop("rollout", {})
    limits = {"min_success_fraction": 0.1} | overrides.pop("failures", {})
    policy = {"attempts": MAX_ATTEMPTS, "delay_seconds": 0.05, "backoff": 1.0}
    kinds = ("agent_error", "timeout", "infra_error", "no_trace", "no_reward")
    iterations = overrides.pop("iterations", 2)
    more = overrides.pop("verl", {})
    config = small_run(
        engine_url,
        ledger,
        run_id=run_id,
        rollout=RolloutSettings(**rollout),
        failures=FailureSettings.model_validate(dict.fromkeys(kinds, policy) | limits),
        agent=overrides.pop("agent", "tests.chaos.agents:solve"),
        **overrides,
    )
    verl = config.algorithm.config | {
        "data.val_max_samples": 4,
        "trainer.total_training_steps": iterations,
        **more,
    }
    algorithm = config.algorithm.model_copy(update={"config": verl})
    return config.model_copy(update={"algorithm": algorithm})


def digests(ledger: Path, run_id: str) -> list[str]:
    """Return the content digests of a run's committed iterations."""
    folder = ledger / "runs" / run_id / "iterations"
    return [json.loads(path.read_text())["content_digest"] for path in manifests(folder)]


def manifests(folder: Path) -> list[Path]:
    """Return the manifests of a run's iterations, in order."""
    return sorted(folder.glob("*/manifest.json"))


def triplets(ledger: Path, run_id: str, iteration: int = 0) -> list[dict[str, Any]]:
    """Return what a run learned from in an iteration, without ids that name the run."""
    folder = ledger / "runs" / run_id / "iterations" / f"{iteration:06d}"
    record = json.loads((folder / "stages/adapt.json").read_text())
    table = pq.read_table(ledger / record["outputs"]["triplets"]["key"])
    columns = ("index", "call_index", "prompt_ids", "response_ids", "logprobs", "reward")
    return table.select(list(columns)).to_pylist()


def outcomes(ledger: Path, run_id: str, iteration: int = 0) -> list[dict[str, Any]]:
    """Return every collected attempt of an iteration."""
    folder = ledger / "runs" / run_id / "iterations" / f"{iteration:06d}"
    record = json.loads((folder / "stages/collect.json").read_text())
    return pq.read_table(ledger / record["outputs"]["outcomes"]["key"]).to_pylist()


def without(rows: Sequence[dict[str, Any]], indices: set[int]) -> list[dict[str, Any]]:
    """Return the rows of other rollouts."""
    return [row for row in rows if row["index"] not in indices]


def requests(ledger: Path, run_id: str, iteration: int = 0) -> list[dict[str, Any]]:
    """Return the training rollouts that an iteration asked for."""
    folder = ledger / "runs" / run_id / "iterations" / f"{iteration:06d}"
    return pq.read_table(folder / "rollouts/train/requests.parquet").to_pylist()


def chosen(ledger: Path, run_id: str, iteration: int, plan: Plan) -> dict[int, str]:
    """Return how the training rollouts that a plan chooses are ill, by index."""
    return {
        row["index"]: plan.kind_of(row["row"], row["sample"])
        for row in requests(ledger, run_id, iteration)
        if plan.chooses(row["row"], row["sample"])
    }
