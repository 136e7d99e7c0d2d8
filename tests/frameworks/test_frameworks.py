"""Agents of the field run unchanged through the proxy: a tool call, its result, the answer.

What the model says is scripted: the rollouts' sampling parameters hold `forced_token_ids`, so an
agent needs to know nothing of it, whatever it speaks. The rest is the product's own: a shard runs
the agent with its proxy, the engine forces the ids, finds tool calls and gives log-probs, and what
the shard flushes becomes triplets and rows.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from agl_core.adapter.columns import spans_to_triplets
from agl_core.config import RolloutSettings
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.storage import open_storage
from agl_core.litagent.decorator import as_agent
from agl_core.runner.shard import Shard, ShardRef
from agl_core.serving.engine import Engine
from agl_core.serving.engine_server import create_app
from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.resources import LLM
from agl_core.types.training import PolicyRef
from agl_core.utils.threaded_server import ThreadedServer
from tests.agl_core.serving.conftest import TOOL_TEMPLATE, write_policy
from tests.builders import make_requests

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(180)]

PYTHON = Path(os.environ.get("FRAMEWORKS_PYTHON", ".venv-frameworks/bin/python"))
AGENTS = Path(__file__).parent / "agents"
NAMES = sorted(file.stem for file in AGENTS.glob("*.py") if file.stem not in ("__init__", "task"))
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'
SAID = [f"I add.{CALL}", "It is 46."]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_policy(tmp_path_factory.mktemp("policy"), seed=2, template=TOOL_TEMPLATE)
    engine = Engine(folder, "v000000")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[str]:
    with ThreadedServer(create_app(engine, allows_forced=True)) as running:
        yield running.url


def script(engine: Engine) -> list[list[int]]:
    """Return the ids of each turn, its end token included."""
    loaded = engine.loaded
    return [[*loaded.encode_text(text), loaded.tokenizer.eos_token_id] for text in SAID]


def open_rollouts(folder: Path, engine: Engine) -> RolloutSet:
    """Write the request for one rollout, its model scripted."""
    served = engine.policy
    policy = PolicyRef(version=served.version, weights_digest=served.weights_digest, path="-")
    rollouts = RolloutSet(IterationLedger(open_storage(str(folder)), "run", 0), "train")
    forced = {"temperature": TEMPERATURE, "extra_body": {"forced_token_ids": script(engine)}}
    rollouts.write_requests(make_requests(1), policy, forced)
    rollouts.claim([0])
    return rollouts


async def run_agent(rollouts: RolloutSet, server: str, name: str, how: str) -> list[str]:
    """Run the one rollout; return the answer in the pieces in which the agent got it."""
    pieces: list[str] = []

    def agent(task: dict[str, Any], llm: LLM) -> float:
        program = [str(PYTHON), str(AGENTS / f"{name}.py")]
        where = [llm.get_base_url(), llm.api_key or "none", llm.model, how]
        done = subprocess.run(
            [*program, *where], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        pieces.extend(json.loads(done.stdout))
        return float("".join(pieces) == SAID[-1])

    ref = ShardRef(
        ledger=rollouts.storage.uri,
        conditional_put=True,
        run_id="run",
        iteration=0,
        rollout_set="train",
        claim=1,
        model_servers=(server,),
        settings=RolloutSettings(timeout_seconds=130),
        start=1,
        concurrency=1,
    )
    shard = Shard(ref, rollouts, rollouts.read_requests().to_pylist(), as_agent(agent))

    async def on_flush(done: int, expected: int) -> None:
        assert (done, expected) == (1, 1)

    async with shard.serving(), shard.flushing(on_flush):
        await shard.run_attempt(0, attempt=1)
        shard.finish(0)
    return pieces


def exact_logprobs(engine: Engine, prompt: list[int], response: list[int]) -> list[float]:
    """Return the log-probs of a response by a plain forward pass."""
    with torch.inference_mode():
        logits = engine.loaded.model(torch.tensor([prompt + response])).logits[0]
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)[len(prompt) - 1 : -1]
    return logprobs[range(len(response)), response].tolist()


@pytest.mark.parametrize("how", ["plain", "stream"])
@pytest.mark.parametrize("name", NAMES)
async def test_an_agent_runs_unchanged_and_its_calls_are_one_row_to_train_on(
    name: str, how: str, engine: Engine, server: str, tmp_path: Path
) -> None:
    rollouts = open_rollouts(tmp_path, engine)
    pieces = await run_agent(rollouts, server, name, how)
    outcomes = rollouts.outcomes()
    (outcome,) = outcomes.to_pylist()
    assert (outcome["kind"], outcome["reward"]) == ("succeeded", 1.0), outcome["message"]
    assert (len(pieces) > 1) == (how == "stream")

    spans = pa.concat_tables(rollouts.iter_spans())
    triplets = spans_to_triplets(spans, outcomes, make_requests(1).select(["index", "group"]))
    forced = script(engine)
    rows = triplets.to_pylist()
    assert [row["response_ids"] for row in rows] == forced  # so one span for each call, and no more
    assert {(row["rollout_id"], row["policy_version"]) for row in rows} == {("ro-0", "v000000")}
    for row in rows:
        expected = exact_logprobs(engine, row["prompt_ids"], row["response_ids"])
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)
    seen = engine.loaded.tokenizer.decode(rows[1]["prompt_ids"])
    assert seen.endswith(f"{SAID[0]}<|end|><|tool|>46<|end|><|assistant|>")

    limits = {"max_prompt_length": 2048, "max_response_length": 2048}
    settings = BatchSettings(
        level="trajectory", temperature=TEMPERATURE, min_group_size=1, **limits
    )
    (trained,) = build_batch(triplets, settings).rows.to_pylist()
    assert trained["drop_reason"] is None
    assert trained["num_calls"] == 2
    assert sum(trained["response_mask"]) == sum(map(len, forced))
