"""Model calls to triplets: prompt ids, response ids and reward, in chronological order within a
rollout.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core import semconv
from agl_core.adapter.call_rewards import match_call_rewards
from agl_core.errors import TraceError
from agl_core.ledger.spans import TOKEN_COLUMNS
from agl_core.ledger.tables import LOGPROBS, REWARDS, SPANS, TRIPLETS, column


def spans_to_triplets(spans: pa.Table, outcomes: pa.Table, groups: pa.Table) -> pa.Table:
    """Return one triplet for each model call that sampled tokens, of each rollout that succeeded.

    Args:
        spans: Spans of some rollouts (schema `SPANS`), in any order.
        outcomes: Attempts (schema `OUTCOMES`) of at least these rollouts; those with `final` and
            kind `succeeded` count, each at most once a rollout.
        groups: Columns `index` and `group`, one row for each of these rollouts or more.

    Returns:
        Triplets (schema `TRIPLETS`) ordered by `index`, then `call_index`. Each carries its
        rollout's final reward, and the emitted rewards that belong to the call. Token ids are the
        recorded ones; nothing is tokenised again. A call whose ids or log-probs are missing or
        incomplete has nulls there and no emitted rewards.

    Raises:
        TraceError: A successful call of such an attempt has no token ids, or not one log-prob for
        each id.
    """
    counted = outcomes.filter(pc.and_(outcomes["final"], pc.equal(outcomes["kind"], "succeeded")))
    counts = _is_of(spans, counted)
    answered = pc.and_(
        pc.equal(spans["name"], semconv.LLM_CALL_SPAN), pc.not_equal(spans["status"], "ERROR")
    )
    calls = spans.filter(pc.and_(answered, counts)).sort_by(
        [("index", "ascending"), ("call_index", "ascending")]
    )
    _check_ids(calls)
    rewards = _look_up(calls["index"], counted["index"], counted["reward"])
    whole = pa.table(
        {
            "index": calls["index"],
            "rollout_id": calls["rollout_id"],
            "group": _look_up(calls["index"], groups["index"], groups["group"]),
            "call_index": calls["call_index"],
            "span_id": calls["span_id"],
            "prompt_ids": calls["prompt_token_ids"],
            "response_ids": calls["response_token_ids"],
            "logprobs": calls["logprobs"],
            "reward": rewards,
            "rewards": match_call_rewards(
                calls, spans.drop(TOKEN_COLUMNS).filter(counts), rewards.to_pylist()
            ),
            "policy_version": calls["policy_version"],
            "temperature": calls["temperature"],
            "sampling": column(calls, "sampling", SPANS),
            "max_tokens": column(calls, "max_tokens", SPANS),
            "finish_reason": calls["finish_reason"],
            "output_tokens": calls["output_tokens"],
        },
        schema=TRIPLETS,
    )
    lost = _lost_calls(spans, counted, groups)
    if not len(lost):
        return whole
    return pa.concat_tables([whole, lost]).sort_by(
        [("index", "ascending"), ("call_index", "ascending")]
    )


def _lost_calls(spans: pa.Table, counted: pa.Table, groups: pa.Table) -> pa.Table:
    """Return triplets without token ids for calls that sampled tokens and failed all the same, most
    often since ids or log-probs were missing or incomplete: they are counted, not trained on.
    """
    has_tokens = pc.or_(
        pc.is_valid(spans["finish_reason"]),
        pc.fill_null(pc.greater(spans["output_tokens"], 0), False),
    )
    failed = pc.and_(
        pc.equal(spans["name"], semconv.LLM_CALL_SPAN), pc.equal(spans["status"], "ERROR")
    )
    calls = spans.filter(pc.and_(pc.and_(failed, has_tokens), _is_of(spans, counted)))
    known = {name: calls[name] for name in TRIPLETS.names if name in calls.column_names}
    known |= {
        "group": _look_up(calls["index"], groups["index"], groups["group"]),
        "reward": _look_up(calls["index"], counted["index"], counted["reward"]),
        "rewards": pa.array([[]] * len(calls), REWARDS),
        "logprobs": pa.nulls(len(calls), LOGPROBS),
    }
    return pa.table(
        {field.name: known.get(field.name, pa.nulls(len(calls), field.type)) for field in TRIPLETS},
        schema=TRIPLETS,
    )


def _is_of(spans: pa.Table, attempts: pa.Table) -> pa.ChunkedArray:
    """Return which spans are of these attempts, at most one a rollout.

    By rollout and attempt: an attempt id is short, two rollouts may have the same.
    """
    deciding = pc.take(
        attempts["attempt_id"].combine_chunks(),
        pc.index_in(spans["index"], value_set=attempts["index"].combine_chunks()),
    )
    return pc.fill_null(pc.equal(spans["attempt_id"], deciding), False)


def _look_up(keys: pa.ChunkedArray, index: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.Array:
    """Return the value at each key; every key is in `index`, which has no duplicates."""
    positions = pc.index_in(keys, value_set=index.combine_chunks())
    return pc.take(values.combine_chunks(), positions.combine_chunks())


def _check_ids(calls: pa.Table) -> None:
    """Refuse calls without ids, or whose ids and log-probs do not pair up."""
    num_ids = pc.fill_null(pc.list_value_length(calls["response_token_ids"]), 0)
    num_logprobs = pc.fill_null(pc.list_value_length(calls["logprobs"]), -1)
    no_prompt = pc.is_null(calls["prompt_token_ids"])
    bad = pc.or_(no_prompt, pc.or_(pc.equal(num_ids, 0), pc.not_equal(num_ids, num_logprobs)))
    first = np.flatnonzero(bad.to_numpy(zero_copy_only=False)) if len(calls) else np.array([])
    if len(first):
        position = int(first[0])
        raise TraceError(
            f"rollout {calls['rollout_id'][position]}: call {calls['call_index'][position]} has "
            f"{num_ids[position]} token ids and {num_logprobs[position]} log-probs; "
            "does the model server return token ids and log-probs?"
        )
