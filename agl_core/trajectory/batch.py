"""Triplets to batch rows, each either in the batch or with the reason why not.

A row is one call (`transition`), or the calls of a rollout that continue each other
(`trajectory`, see `agl_core.trajectory.join`). Its response is everything after its first prompt,
and only what the policy sampled has loss weight::

    call 0   prompt 1 2       response 3
    call 1   prompt 1 2 3 4   response 5 6
    row      prompt 1 2       response 3 4 5 6   mask 1 0 1 1   token rewards 0 0 0 1
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from agl_core.errors import TraceError
from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.breaks import Vocabulary, breaks_table, find_breaks
from agl_core.trajectory.credit import Credit, assign_credit
from agl_core.trajectory.cut import Cut, Limit, join_notes
from agl_core.trajectory.filters import drop_groups, is_kept, row_reasons
from agl_core.trajectory.join import join_calls, keep_apart
from agl_core.trajectory.layout import CallColumns, RowLayout
from agl_core.trajectory.ragged import list_array, starts_of, take_ranges
from agl_core.trajectory.settings import BatchSettings
from agl_core.trajectory.tokens import count_lost_tokens, count_tokens, has_token_ids
from agl_core.types.outcome import DropReason, TokenCoverage


@dataclass(frozen=True, slots=True)
class Batch:
    """What triplets became."""

    rows: pa.Table
    """Schema `BATCH_ROWS`, by rollout and first call, `row` numbered from 0."""
    breaks: pa.Table
    """Schema `BREAKS`."""
    tokens: TokenCoverage


def build_batch(
    triplets: pa.Table,
    settings: BatchSettings,
    vocabulary: Vocabulary | None = None,
    *,
    failed_groups: np.ndarray | None = None,
    end_ids: frozenset[int] = frozenset(),
) -> Batch:
    """Return the rows of a batch, why rows break off, and what became of every sampled token.

    Rows with a drop reason are whole; the others are cut where they are too long and the settings
    say so. A row's lists over its response have the response's length.

    Args:
        triplets: Schema `TRIPLETS`, ordered by `index`, then by call; every call has at least one
            response token, and as many log-probs, or no ids at all: then it only counts.
        settings: The rules.
        vocabulary: Of the policy, to tell breaks apart; None calls most of them `other`.
        failed_groups: Groups that are dropped whole because a rollout of theirs failed.
        end_ids: Tokens by which the policy ends a response; empty if they are not known.

    Raises:
        TraceError: A row is too long and the settings say `error`.
    """
    has_ids = has_token_ids(triplets)
    lost = count_lost_tokens(triplets)
    triplets = triplets.filter(has_ids)
    calls = CallColumns.read(triplets, settings, end_ids)
    at_temperature = calls.temperature == settings.temperature
    comparable = at_temperature & calls.is_sampled_as_asked
    if settings.level == "transition":
        joins, breaks = keep_apart(len(calls)), []
    else:
        ids = (calls.prompts, calls.responses, calls.index)
        joins = join_calls(*ids, comparable)
        breaks = find_breaks(*ids, joins, comparable, vocabulary)
    credit = assign_credit(triplets, settings)
    layout = RowLayout.of(calls, joins)
    first = layout.first
    prompt = Limit(
        "prompt",
        calls.prompts.lengths[first],
        settings.max_prompt_length,
        settings.prompt_truncation,
    )
    response = Limit(
        "response", layout.lengths, settings.max_response_length, settings.response_truncation
    )
    reasons = row_reasons(
        settings,
        at_temperature=at_temperature[first],
        as_asked=calls.is_sampled_as_asked[first],
        unusable=credit.unusable[first],
        prompt=prompt,
        response=response,
        unfinished=calls.is_cut_short[layout.last],
    )
    for limit in (prompt, response):
        _refuse_long(triplets, first, limit, reasons)
    group = calls.group[first]
    if failed_groups is not None:
        reasons[is_kept(reasons) & np.isin(group, failed_groups)] = DropReason.GROUP_FAILED.value
    reasons = drop_groups(
        reasons,
        settings,
        group=group,
        index=calls.index[first],
        rollout_reward=credit.rollout[first],
    )
    in_batch = is_kept(reasons)
    cuts = prompt.cut(in_batch), response.cut(in_batch)
    rows = _to_table(triplets, calls, layout, credit, reasons, cuts, settings)
    tokens = count_tokens(
        int(calls.responses.lengths.sum()),
        np.bincount(layout.row, layout.num_sampled, minlength=len(rows)).astype(np.int64),
        rows,
        lost,
    )
    return Batch(rows, breaks_table(breaks, joins, triplets), tokens)


def _refuse_long(triplets: pa.Table, first: np.ndarray, limit: Limit, reasons: np.ndarray) -> None:
    """Raise for the first row that would be in the batch and is too long to be there."""
    bad = np.flatnonzero(limit.is_exceeded("error") & is_kept(reasons))
    if len(bad):
        call = int(first[bad[0]])
        raise TraceError(
            f"rollout {triplets['rollout_id'][call]}: the {limit.part} of its row from call "
            f"{triplets['call_index'][call]} on has {limit.lengths[bad[0]]} tokens, above the "
            f"limit of {limit.limit}; raise the limit, or choose another truncation than 'error'"
        )


def _to_table(
    triplets: pa.Table,
    calls: CallColumns,
    layout: RowLayout,
    credit: Credit,
    reasons: np.ndarray,
    cuts: tuple[Cut, Cut],
    settings: BatchSettings,
) -> pa.Table:
    """Return the rows with their prompts and responses cut."""
    first, (prompt, response) = layout.first, cuts
    starts, kept = starts_of(layout.lengths) + response.left, response.kept
    ids, logprobs, codes = (take_ranges(v, starts, kept) for v in layout.spread(calls))
    mask = (codes >= 0).astype(np.int8)
    if not settings.learns:
        mask[:] = 0
    if settings.unfinished == "mask":
        mask[np.repeat(calls.is_cut_short[layout.last], kept)] = 0
    token_rewards, rewards = _place_rewards(layout, credit, starts, kept)
    versions = pa.DictionaryArray.from_arrays(
        pa.array(codes, mask=codes < 0), calls.versions.dictionary
    )
    named = triplets.select(["index", "rollout_id", "group", "call_index"]).take(pa.array(first))
    numbers, index = np.arange(len(first)), calls.index[first]
    return pa.table(
        {
            "row": pa.array(numbers, pa.int32()),
            **dict(zip(named.column_names, named.columns, strict=True)),
            "step": pa.array(numbers - np.searchsorted(index, index), pa.int32()),
            "num_calls": pa.array(layout.num_calls, pa.int32()),
            "prompt_ids": calls.prompts.take(
                calls.prompts.starts[first] + prompt.left, prompt.kept
            ).to_arrow(),
            "response_ids": list_array(pa.array(ids), kept),
            "response_mask": list_array(pa.array(mask), kept),
            "rollout_logprobs": list_array(pa.array(logprobs), kept),
            "policy_versions": list_array(versions, kept),
            "token_rewards": list_array(pa.array(token_rewards), kept),
            "reward": pa.array(rewards, pa.float64()),
            "rollout_reward": pa.array(credit.rollout[first], pa.float64()),
            "truncated": pa.array(join_notes(prompt, response), pa.string()),
            "drop_reason": pa.array(reasons, pa.string()),
        },
        schema=BATCH_ROWS,
    )


def _place_rewards(
    layout: RowLayout, credit: Credit, starts: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the reward of each token that is kept, float32, and their sum in each row, float64.

    A call's reward is on its last sampled token that is kept, and is gone where none is. A reward
    of the rollout is on the last sampled token of each row.

    Args:
        layout: N rows of C calls.
        credit: Of the calls.
        starts: [N] where the kept tokens of each row start among all.
        kept: [N] how many there are.
    """
    begin, row = layout.sampled_starts, layout.row
    last = np.minimum(begin + layout.num_sampled, (starts + kept)[row]) - 1
    is_there = last >= np.maximum(begin, starts[row])
    place = last + (starts_of(kept) - starts)[row]
    token_rewards = np.zeros(int(kept.sum()), dtype=np.float32)
    if credit.on_rows:
        rewards = credit.rollout[layout.first]
        if len(rewards):
            last_places = np.maximum.reduceat(np.where(is_there, place, -1), layout.begins)
            token_rewards[last_places] = rewards
        return token_rewards, rewards
    values = credit.call[layout.calls][is_there]
    token_rewards[place[is_there]] = values
    return token_rewards, np.bincount(row[is_there], values, minlength=len(kept))
