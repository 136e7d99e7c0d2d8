"""SmolLM2 trained against real vLLM on a CPU, by the run's own path: two iterations, the weights
reloaded between them.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from transformers import AutoModelForCausalLM

from agl_core import semconv
from agl_core.config import RunConfig
from agl_core.ledger import files
from agl_core.ledger.run import RunLedger
from agl_core.ledger.tables import BATCH_ROWS, SPANS, TRIPLETS, UPDATE_ROWS
from deployments.cli import read_config
from examples.word_problems.fetch_model import MODEL, fetch
from tests.conftest import train
from tests.vllm.test_vllm import PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
TEMPERATURE = 0.7


EXAMPLES = {
    "word_problems": {"actor_rollout_ref.rollout.n": 4},
    # This model gets none of the calculator's right, and equal rewards teach nothing: here it
    # learns from the entropy of its answers alone.
    "calculator": {
        "data.train_batch_size": 4,
        "actor_rollout_ref.model.path": str(MODEL),
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
    },
}


@pytest.fixture(scope="module", params=EXAMPLES)
def run(
    request: pytest.FixtureRequest, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunLedger]:
    """An example's run made small, served by vLLM: 2 iterations of 4 x 4 rollouts."""
    fetch()
    name: str = request.param
    folder = tmp_path_factory.mktemp("vllm-training")
    config = read_config(
        Path("examples", name, "run.yaml"), {"ledger": str(folder), "run_id": "vllm-training"}
    )
    verl = config.algorithm.config | {
        **EXAMPLES[name],
        "actor_rollout_ref.rollout.temperature": TEMPERATURE,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "trainer.total_training_steps": 2,
    }
    vllm = {
        "python": str(PYTHON.absolute()),
        "args": ["--enforce-eager", "--max-model-len", "512", "--dtype", "float32"],
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    values = config.model_dump() | {
        "algorithm": {"type": "verl", "config": verl},
        "val_data": None,
        "serving": {"vllm": vllm, "startup_timeout_seconds": 900},
    }
    yield train(RunConfig.model_validate(values))
    shutil.rmtree(folder)  # 4 GB


def table(run: RunLedger, iteration: int, stage: str, name: str, schema: pa.Schema) -> pa.Table:
    file = run.iteration(iteration).finished(stage).file(name)
    return files.read_table(run.storage, file, schema)


def test_each_iteration_is_answered_by_the_version_that_the_one_before_made(run: RunLedger) -> None:
    first, second = run.manifests()
    assert first.policy_out == second.policy_in
    assert [m.policy_in.version for m in (first, second)] == ["v000000", "v000001"]
    assert first.policy_in.weights_digest != second.policy_in.weights_digest
    for manifest in (first, second):
        assert (manifest.coverage.expected, manifest.coverage.trained) == (16, 16)
        spans = table(run, manifest.iteration, "collect", "spans", SPANS)
        calls = spans.filter(pc.equal(spans["name"], semconv.LLM_CALL_SPAN))
        policy = manifest.policy_in
        assert pc.unique(calls["policy_version"]).to_pylist() == [policy.version]
        assert pc.unique(calls["weights_digest"]).to_pylist() == [policy.weights_digest]


def test_log_probs_are_those_of_the_weights_that_learn_and_not_of_the_first_ones(
    run: RunLedger,
) -> None:
    for iteration in (0, 1):
        rows = table(run, iteration, "adapt", "batch", BATCH_ROWS)
        update = table(run, iteration, "update", "update_rows", UPDATE_ROWS)
        assert update["row"].to_pylist() == rows["row"].to_pylist()
        sampled = rows["rollout_logprobs"].combine_chunks().flatten().to_numpy()
        learned = update["old_log_probs"].combine_chunks().flatten().to_numpy()
        assert np.abs(sampled - learned).max() < 1e-3
    base: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for iteration, differs in ((0, False), (1, True)):
        triplets = table(run, iteration, "adapt", "triplets", TRIPLETS).to_pylist()
        distance = max(distance_to(base, triplet) for triplet in triplets)
        assert (distance > 1e-2) is differs, distance


def distance_to(model: Any, triplet: dict[str, Any]) -> float:
    """Return how far recorded log-probs are from a model's, at the farthest token."""
    prompt, response = triplet["prompt_ids"], triplet["response_ids"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)[len(prompt) - 1 : -1]
    expected = logprobs[range(len(response)), response]
    return (expected - torch.tensor(triplet["logprobs"])).abs().max().item()
