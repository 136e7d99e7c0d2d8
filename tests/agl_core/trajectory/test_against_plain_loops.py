import numpy as np
from hypothesis import given, settings

from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.settings import BatchSettings
from tests.agl_core.trajectory.conversations import batch_settings, rollouts
from tests.agl_core.trajectory.plain import plain_rows
from tests.builders import make_triplets

COMPARED = (
    *("row", "index", "rollout_id", "group", "call_index", "step", "num_calls", "prompt_ids"),
    *("response_ids", "response_mask", "rollout_logprobs", "policy_versions", "reward"),
    *("rollout_reward", "truncated", "drop_reason"),
)
RESPONSE_LISTS = (
    *("response_ids", "response_mask", "rollout_logprobs", "policy_versions", "token_rewards"),
)


@settings(max_examples=150, deadline=None)
@given(rollouts(), batch_settings())
def test_rows_agree_with_plain_loops(triplets: list[dict], rules: BatchSettings):
    table = make_triplets(*triplets)
    built = build_batch(table, rules).rows.to_pylist()
    expected = plain_rows(table.to_pylist(), rules)
    assert len(built) == len(expected)
    for row, other in zip(built, expected, strict=True):
        assert {name: row[name] for name in COMPARED} == {name: other[name] for name in COMPARED}
        assert row["token_rewards"] == [float(np.float32(r)) for r in other["token_rewards"]]


@settings(max_examples=75, deadline=None)
@given(rollouts(), batch_settings())
def test_lists_have_one_length_and_only_sampled_tokens_have_weight(
    triplets: list[dict], rules: BatchSettings
):
    for row in build_batch(make_triplets(*triplets), rules).rows.to_pylist():
        assert len({len(row[name]) for name in RESPONSE_LISTS}) == 1
        for weight, version, reward, logprob in zip(
            *(row[n] for n in ("response_mask", "policy_versions", "token_rewards")),
            row["rollout_logprobs"],
            strict=True,
        ):
            assert weight in (0, 1)
            assert version is not None or (weight, reward, logprob) == (0, 0.0, 0.0)


@settings(max_examples=75, deadline=None)
@given(rollouts(), batch_settings())
def test_every_sampled_token_is_accounted_for(triplets: list[dict], rules: BatchSettings):
    batch = build_batch(make_triplets(*triplets), rules)
    sampled = sum(len(triplet["response_ids"]) for triplet in triplets)
    rows = batch.rows.to_pylist()
    kept = [row for row in rows if row["drop_reason"] is None]
    in_rows = sum(version is not None for row in rows for version in row["policy_versions"])
    assert batch.tokens.sampled == sampled
    assert batch.tokens.trained == sum(sum(row["response_mask"]) for row in kept)
    assert batch.tokens.dropped.get("truncated", 0) == sampled - in_rows
    by_reason = sum(n for reason, n in batch.tokens.dropped.items() if reason != "truncated")
    assert by_reason == sum(
        version is not None
        for row in rows
        if row["drop_reason"] is not None
        for version in row["policy_versions"]
    )
    if rules.unfinished != "mask":
        assert batch.tokens.masked == 0


@settings(max_examples=50, deadline=None)
@given(rollouts())
def test_without_limits_a_row_holds_the_calls_that_it_names(triplets: list[dict]):
    """Sampled tokens of a rollout's rows are those of its calls, each once."""
    rules = BatchSettings(
        level="trajectory", max_prompt_length=99, max_response_length=999, temperature=1.0
    )
    rows = build_batch(make_triplets(*triplets), rules).rows.to_pylist()
    assert sum(row["num_calls"] for row in rows) == len(triplets)
    for index in {triplet["index"] for triplet in triplets}:
        calls = [i for t in triplets if t["index"] == index for i in t["response_ids"]]
        held = [
            token
            for row in rows
            if row["index"] == index
            for token, version in zip(row["response_ids"], row["policy_versions"], strict=True)
            if version is not None
        ]
        assert sorted(held) == sorted(calls)
