"""A real small language model through the same flow: real tokens, a real chat template, VERL."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from transformers import AutoTokenizer

from agl_core import semconv
from agl_core.config import RunConfig
from agl_core.ledger import files
from agl_core.ledger.run import RunLedger
from agl_core.ledger.tables import BATCH_ROWS, SPANS, TRIPLETS, UPDATE_ROWS
from deployments.cli import read_config
from examples.word_problems.fetch_model import MODEL
from tests.conftest import train

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
ITERATIONS = range(2)


@pytest.fixture(scope="module")
def model() -> Path:
    """The folder that `make demo MODEL=smollm2` trains; the first time, it is downloaded."""
    script = [sys.executable, "-m", "examples.word_problems.fetch_model"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return MODEL


@pytest.fixture(scope="module")
def run(
    prefect_api: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunLedger]:
    """The example's run made small, with an engine of its own: 2 iterations of 4 x 4 rollouts."""
    folder = tmp_path_factory.mktemp("word-problems")
    config = read_config(Path("examples/word_problems/run.yaml"), {"ledger": str(folder)})
    verl = config.algorithm.config | {
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.n": 4,
        "trainer.total_training_steps": len(ITERATIONS),
    }
    values = config.model_dump() | {
        "algorithm": {"type": "verl", "config": verl},
        "val_data": None,
    }
    yield train(RunConfig.model_validate(values))
    shutil.rmtree(folder)  # 4 GB


def table(run: RunLedger, iteration: int, stage: str, name: str, schema: pa.Schema) -> pa.Table:
    file = run.iteration(iteration).finished(stage).file(name)
    return files.read_table(run.storage, file, schema)


def test_versions_form_a_chain_and_each_iteration_trains_on_what_it_rolled_out(run: RunLedger):
    first, second = run.manifests()
    assert first.policy_in.version == "v000000"
    assert first.policy_out is not None
    assert second.policy_out is not None
    assert first.policy_out == second.policy_in
    versions = [first.policy_in, first.policy_out, second.policy_out]
    assert len({policy.weights_digest for policy in versions}) == 3
    for manifest in (first, second):
        assert (manifest.coverage.expected, manifest.coverage.trained) == (16, 16)
        spans = table(run, manifest.iteration, "collect", "spans", SPANS)
        calls = spans.filter(pc.equal(spans["name"], semconv.LLM_CALL_SPAN))
        assert pc.unique(calls["weights_digest"]).to_pylist() == [manifest.policy_in.weights_digest]


def test_each_prompt_is_what_the_chat_template_gives_for_the_conversation(
    run: RunLedger, model: Path
):
    tokenizer = AutoTokenizer.from_pretrained(model)
    for iteration in ITERATIONS:
        spans = table(run, iteration, "collect", "spans", SPANS).to_pylist()
        attributes = {span["span_id"]: json.loads(span["attributes"]) for span in spans}
        triplets = table(run, iteration, "adapt", "triplets", TRIPLETS).to_pylist()
        assert len(triplets) == 16
        for triplet in triplets:
            messages = json.loads(attributes[triplet["span_id"]][semconv.INPUT_MESSAGES])
            expected = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            assert tokenizer.decode(triplet["prompt_ids"]) == expected
            assert messages[0]["content"] in expected


def test_each_response_ends_where_the_model_ended_it(run: RunLedger, model: Path):
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    for iteration in ITERATIONS:
        for triplet in table(run, iteration, "adapt", "triplets", TRIPLETS).to_pylist():
            ids = triplet["response_ids"]
            assert end not in ids[:-1]
            assert (ids[-1] == end) is (triplet["finish_reason"] == "stop")
            assert len(ids) == 32 or ids[-1] == end


def test_recorded_log_probs_agree_with_what_verl_computes(run: RunLedger):
    for iteration in ITERATIONS:
        rows = table(run, iteration, "adapt", "batch", BATCH_ROWS)
        update = table(run, iteration, "update", "update_rows", UPDATE_ROWS)
        assert update["row"].to_pylist() == rows["row"].to_pylist()
        sampled = rows["rollout_logprobs"].combine_chunks().flatten().to_numpy()
        recomputed = update["old_log_probs"].combine_chunks().flatten().to_numpy()
        assert np.abs(sampled - recomputed).max() < 1e-3
