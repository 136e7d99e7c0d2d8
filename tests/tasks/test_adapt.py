"""Stage `adapt` on what real agents left: shards, proxy, spans and ledger are real, the model's
replies are known.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai import OpenAI

from agl_core.config import RolloutSettings
from agl_core.emitter.reward import emit_reward
from agl_core.errors import LedgerError
from agl_core.failures import FailureSettings
from agl_core.ledger import files
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import open_run
from agl_core.ledger.stages import IterationLedger, StageRecord
from agl_core.ledger.tables import BATCH_ROWS, BREAKS
from agl_core.litagent.decorator import as_agent
from agl_core.runner.shard import Shard, ShardRef
from agl_core.stages.propose import TRAIN_SET
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.resources import LLM
from tasks import context
from tasks.adapt import adapt
from tasks.collect import collect
from tasks.context import IterationRef
from tests.builders import POLICY, make_requests
from tests.fakes import ScriptedModelServer, encode_chars

NUM_TURNS = 3


def talks(task: dict[str, Any], llm: LLM) -> float:
    """A writer of three turns, each with a reward, and a critic that is asked between them."""
    with OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0) as client:

        def ask(messages: list[Any]) -> str:
            answer = client.chat.completions.create(
                model=llm.model, messages=messages, **llm.sampling_parameters
            )
            return answer.choices[0].message.content or ""

        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        for turn in range(NUM_TURNS):
            messages.append({"role": "assistant", "content": ask(messages)})
            messages.append({"role": "user", "content": "go on"})
            if turn == 0:
                ask([{"role": "system", "content": "judge"}])
                emit_reward({"accuracy": 0.25, "style": 1.0}, primary_key="accuracy")
    return float(len(task["question"]) % 2)


def forgets(task: dict[str, Any], llm: LLM) -> float:
    """Changes what the model said before it asks again, and so does every harness that trims."""
    with OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            answer = client.chat.completions.create(
                model=llm.model, messages=messages, **llm.sampling_parameters
            )
            text = (answer.choices[0].message.content or "")[1:]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    return 1.0


def streams(task: dict[str, Any], llm: LLM) -> float:
    """Two calls, both streamed."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    with OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0) as client:
        for _ in range(2):
            chunks = client.chat.completions.create(
                model=llm.model, messages=messages, stream=True, **llm.sampling_parameters
            )
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    return 1.0


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(weights_digest=POLICY.weights_digest) as running:
        yield running


@dataclass
class Adapted:
    """What the stage left."""

    record: StageRecord
    rows: list[dict[str, Any]]
    breaks: list[dict[str, Any]]


async def adapt_rollouts(
    agent: Any,
    server: ScriptedModelServer,
    folder: Path,
    between: Callable[[IterationLedger], object] = lambda iteration: None,
    **overrides: Any,
) -> Adapted:
    """Run four rollouts in two groups, then the stages `collect` and `adapt`; something may happen
    between these.
    """
    ref = IterationRef(ledger=str(folder), run_id="run", iteration=0)
    ledger = open_run(ref.ledger, ref.run_id)
    iteration = ledger.iteration(0)
    rollouts = RolloutSet(iteration, TRAIN_SET)
    requests = [
        row | {"input": f'{{"question": "{"a" * (row["index"] + 1)}"}}'}
        for row in make_requests(4).to_pylist()
    ]
    table = pa.Table.from_pylist(requests, schema=make_requests(0).schema)
    rollouts.write_requests(table, POLICY, {"max_tokens": 8, "temperature": 1.0})
    rollouts.claim(range(4))
    shard_ref = ShardRef(
        ledger=rollouts.storage.uri,
        conditional_put=True,
        run_id="run",
        iteration=0,
        rollout_set=TRAIN_SET,
        claim=1,
        model_servers=(server.base_url.removesuffix("/v1"),),
        settings=RolloutSettings(),
        start=1,
        concurrency=4,
    )
    shard = Shard(shard_ref, rollouts, requests, as_agent(agent))

    async def show(done: int, expected: int) -> None:
        del done, expected

    async with shard.serving(), shard.flushing(show):
        for index in shard.indices:
            await shard.run_attempt(index, attempt=1)
            shard.finish(index)
    rules = {"max_prompt_length": 64, "max_response_length": 256, "temperature": 1.0}
    settings = BatchSettings.model_validate({"level": "trajectory", **rules, **overrides})
    config = SimpleNamespace(
        control="none", pass_reward=1.0, seed=1, min_group_size=None, failures=FailureSettings()
    )
    algorithm = SimpleNamespace(batch_settings=settings, model_path=str(folder))
    run: Any = SimpleNamespace(ledger=ledger, config=config, algorithm=algorithm)
    token = context._context.set(context.RunContext(run, SimpleNamespace(), False))  # type: ignore
    try:
        collect.fn(ref, TRAIN_SET, POLICY)
        between(iteration)
        record = adapt.fn(ref)
    finally:
        context._context.reset(token)
    rows = files.read_table(iteration.storage, record.file("batch"), BATCH_ROWS)
    breaks = files.read_table(iteration.storage, record.file("breaks"), BREAKS)
    return Adapted(record, rows.to_pylist(), breaks.to_pylist())


@pytest.mark.parametrize("name", ["spans", "outcomes"])
async def test_a_file_that_was_changed_after_its_stage_is_not_read(server, tmp_path, name: str):
    def change(iteration: IterationLedger) -> None:
        path = iteration.storage.local_path(iteration.finished("collect").file(name).key)
        assert path is not None
        table = pq.read_table(path)
        column = {"spans": "response_token_ids", "outcomes": "reward"}[name]
        place = table.schema.get_field_index(column)
        changed = pa.array([None] * len(table), table.schema.field(column).type)
        pq.write_table(table.set_column(place, table.schema.field(place), changed), path)

    with pytest.raises(LedgerError, match=rf"{name}\.parquet has sha256 .* its record says"):
        await adapt_rollouts(talks, server, tmp_path, between=change)


async def test_the_turns_of_each_agent_become_one_row(server, tmp_path):
    adapted = await adapt_rollouts(talks, server, tmp_path)
    assert [(row["index"], row["step"], row["num_calls"]) for row in adapted.rows] == [
        (index, step, calls) for index in range(4) for step, calls in ((0, 3), (1, 1))
    ]
    writer = adapted.rows[0]
    observation = len("\nuser: go on\nassistant: ")
    assert writer["prompt_ids"] == encode_chars("user: a\nassistant: ")
    assert writer["response_mask"] == ([1] * 8 + ([0] * observation + [1] * 8) * (NUM_TURNS - 1))
    asked = [request for request in server.requests if request["messages"][0]["content"] == "a"]
    said = [m["content"] for m in asked[-1]["messages"] if m["role"] == "assistant"]
    assert writer["response_ids"][:8] == encode_chars(said[0])
    assert {row["drop_reason"] for row in adapted.rows} == {None}
    values = adapted.record.values
    assert values["tokens"] == {
        "sampled": 4 * 4 * 8,
        "trained": 4 * 4 * 8,
        "masked": 0,
        "dropped": {},
    }
    assert values["calls"] == {"sampled": 16, "trained": 16, "masked": 0, "dropped": {}}
    assert values["coverage"]["trained"] == 4
    assert values["breaks"] == {"branch": 0, "template": 0, "retokenised": 0, "other": 4}


async def test_rewards_on_the_way_reach_their_calls(server, tmp_path):
    weights = {"accuracy": 2.0, "primary": 1.0}
    adapted = await adapt_rollouts(
        talks, server, tmp_path, credit="per_call", reward_weights=weights
    )
    writer, critic = adapted.rows[:2]
    assert critic["token_rewards"] == [0.0] * 7 + [0.5], "the call that the reward followed"
    assert [place for place, reward in enumerate(writer["token_rewards"]) if reward] == [
        len(writer["response_ids"]) - 1
    ]
    assert writer["rollout_reward"] == 1.5


async def test_an_answer_that_was_changed_breaks_the_row_and_is_counted(server, tmp_path):
    adapted = await adapt_rollouts(forgets, server, tmp_path)
    assert [row["num_calls"] for row in adapted.rows] == [1] * 8
    first = adapted.breaks[0]
    row = adapted.rows[0]
    assert (first["row"], first["call_index"], first["kind"]) == (1, 1, "other")
    assert first["position"] == len(row["prompt_ids"])
    assert first["expected_id"] == row["response_ids"][0]
    assert adapted.record.values["breaks"]["other"] == 4


async def test_the_stage_says_what_it_dropped(server, tmp_path):
    adapted = await adapt_rollouts(talks, server, tmp_path, max_prompt_length=19)
    reasons = [row["drop_reason"] for row in adapted.rows]
    assert reasons == ["group_too_small", *["prompt_too_long"] * 7]
    assert adapted.record.values["tokens"] == {
        "sampled": 128,
        "trained": 0,
        "masked": 0,
        "dropped": {"group_too_small": 24, "prompt_too_long": 104},
    }


async def test_a_call_without_whole_token_ids_beside_whole_ones_is_counted(
    server, tmp_path, caplog: pytest.LogCaptureFixture
):
    seen: list[object] = []

    def lose_one(events: list[Any]) -> list[Any]:
        seen.append(events)
        return events[:3] + events[4:] if len(seen) % 2 else events

    server.edit_events = lose_one
    adapted = await adapt_rollouts(streams, server, tmp_path)
    assert [row["num_calls"] for row in adapted.rows] == [1] * 4
    assert adapted.record.values["calls"] == {
        "sampled": 8,
        "trained": 4,
        "masked": 0,
        "dropped": {"no_token_ids": 4},
    }
    assert adapted.record.values["tokens"] == {
        "sampled": 64,
        "trained": 32,
        "masked": 0,
        "dropped": {"no_token_ids": 32},
    }
    assert "4 of 8 model calls came without whole token ids or log-probs" in caplog.text
