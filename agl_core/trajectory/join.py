"""Which calls of a rollout continue each other, token by token.

A call continues an earlier one where its prompt starts with all ids of that one's context, which is
its prompt and its response::

    call 0   prompt 1 2       response 3     context 1 2 3
    call 1   prompt 1 2 3 4   response 5     starts with 1 2 3: joins, token 4 is an observation
    call 2   prompt 1 2 3 6   response 7     would too, but call 1 has taken it: a fork, a new row

Only prompts are compared with contexts, so a call that is made twice never continues itself. The
longest context wins, among equal ones the latest; a context is continued once. A hash finds the
candidates in time that grows with the tokens; every join is then compared id by id.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from agl_core.trajectory.ragged import Ragged, ranges, starts_of

_BLOCK_TOKENS = 1 << 21
"""Prompt tokens that are hashed at a time, in whole rollouts."""
_FILTER_BITS = 20


@dataclass(frozen=True, slots=True)
class Joins:
    """Where each of C calls went; rows are numbered by their first call."""

    row: np.ndarray
    """[C] int64."""
    shared: np.ndarray
    """[C] int64, prompt tokens that are the row's so far; 0 for the first call of a row."""
    forked: np.ndarray
    """[C] bool, where the call starts a row though it continues a context: that one was taken."""

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return int(self.row.max(initial=-1)) + 1


def keep_apart(num_calls: int) -> Joins:
    """Return a row for each call."""
    none = np.zeros(num_calls, dtype=np.int64)
    return Joins(np.arange(num_calls), none, none.astype(bool))


def join_calls(
    prompts: Ragged, responses: Ragged, rollout: np.ndarray, comparable: np.ndarray
) -> Joins:
    """Return the rows that the calls of each rollout form.

    Args:
        prompts: [C] ids of each call's prompt.
        responses: [C] ids of each call's response.
        rollout: [C] ascending; the calls of each in the order in which they were made.
        comparable: [C] bool; other calls are rows of their own that no call continues.
    """
    context_lengths = prompts.lengths + responses.lengths
    shared = np.zeros(len(prompts), dtype=np.int64)
    forked = np.zeros(len(prompts), dtype=bool)
    before = np.full(len(prompts), -1)
    taken = np.zeros(len(prompts), dtype=bool)
    for call, contexts in _candidates(prompts, responses, rollout, comparable):
        for context in contexts:
            if taken[context] and forked[call]:
                continue
            if not _continues(prompts, responses, call, context):
                continue
            if taken[context]:
                forked[call] = True
                continue
            taken[context] = True
            before[call] = context
            shared[call] = context_lengths[context]
            forked[call] = False
            break
    return Joins(_number_rows(before), shared, forked)


def _number_rows(before: np.ndarray) -> np.ndarray:
    """Return each call's row from the call before it in the row; -1 starts one."""
    row = np.cumsum(before < 0) - 1
    for call in np.flatnonzero(before >= 0).tolist():
        row[call] = row[before[call]]
    return row


def _continues(prompts: Ragged, responses: Ragged, call: int, context: int) -> bool:
    """Say whether a call's prompt starts with a context, id by id."""
    prompt, first, then = prompts[call], prompts[context], responses[context]
    return np.array_equal(prompt[: len(first)], first) and np.array_equal(
        prompt[len(first) : len(first) + len(then)], then
    )


def _candidates(
    prompts: Ragged, responses: Ragged, rollout: np.ndarray, comparable: np.ndarray
) -> Iterator[tuple[int, list[int]]]:
    """Yield each call with the contexts that its prompt seems to start with, the best one first."""
    longest = int((prompts.lengths + responses.lengths).max(initial=0))
    generator = np.random.default_rng(0)  # any constants do: joins are compared id by id
    factors = generator.integers(1 << 63, size=longest, dtype=np.uint64) | np.uint64(1)
    for low, high in _blocks(prompts.lengths, rollout):
        block = slice(low, high)
        _, salts = np.unique(rollout[block], return_inverse=True)
        salts = (salts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        prefixes, contexts = _hashes(prompts, responses, block, factors, salts)
        usable = np.flatnonzero(comparable[block])
        by_key = usable[np.argsort(contexts[usable], kind="stable")]
        keys = contexts[by_key]
        places = _places_of(prefixes, keys)
        left = np.searchsorted(keys, prefixes[places], side="left")
        counts = np.searchsorted(keys, prefixes[places], side="right") - left
        starts = starts_of(prompts.lengths[block])
        calls = np.repeat(np.searchsorted(starts, places, side="right") - 1, counts)
        lengths = np.repeat(places, counts) - starts[calls] + 1
        found = by_key[ranges(left, counts)]
        context_lengths = (prompts.lengths + responses.lengths)[block]
        good = (found < calls) & comparable[block][calls] & (context_lengths[found] == lengths)
        calls, found, lengths = calls[good], found[good], lengths[good]
        order = np.lexsort((-found, -lengths, calls))
        calls, found = calls[order], found[order]
        firsts = np.flatnonzero(np.diff(calls, prepend=-1))
        for group in np.split(np.arange(len(calls)), firsts[1:]) if len(calls) else ():
            yield low + int(calls[group[0]]), (low + found[group]).tolist()


def _blocks(lengths: np.ndarray, rollout: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield stretches of calls: whole rollouts of some million tokens together, at least one."""
    edges = [*np.flatnonzero(np.diff(rollout, prepend=-1)).tolist(), len(rollout)]
    tokens = np.concatenate([[0], np.cumsum(lengths)])
    low = 0
    for edge, following in pairwise(edges):
        if tokens[following] - tokens[low] > _BLOCK_TOKENS and edge > low:
            yield low, edge
            low = edge
    if low < len(rollout):
        yield low, len(rollout)


def _hashes(
    prompts: Ragged, responses: Ragged, block: slice, factors: np.ndarray, salts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of every prefix of each prompt, flat, and that of each call's context.

    A prefix has the sum of its ids plus 1, each times the factor of its place, modulo 2**64.
    """
    prompt_lengths, response_lengths = prompts.lengths[block], responses.lengths[block]
    starts = starts_of(prompt_lengths)
    sums = _running_sum(prompts, block, ranges(np.zeros_like(starts), prompt_lengths), factors)
    bases = salts - sums[starts]
    prefixes = sums[1:] + np.repeat(bases, prompt_lengths)
    places = ranges(prompt_lengths, response_lengths)
    after = _running_sum(responses, block, places, factors)
    starts_after = starts_of(response_lengths)
    contexts = sums[starts + prompt_lengths] + bases
    contexts += after[starts_after + response_lengths] - after[starts_after]
    return prefixes, contexts


def _running_sum(
    lists: Ragged, block: slice, places: np.ndarray, factors: np.ndarray
) -> np.ndarray:
    """Return [T + 1] sums of the hashed ids of some lists, from 0."""
    begin = lists.starts[block][0]
    ids = lists.values[begin : begin + len(places)].astype(np.uint64) + np.uint64(1)
    sums = np.zeros(len(places) + 1, dtype=np.uint64)
    np.cumsum(ids * factors[places], out=sums[1:])
    return sums


def _places_of(hashes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the places of hashes that may be among some keys: nearly all others fall out here."""
    shift = np.uint64(64 - _FILTER_BITS)
    marked = np.zeros(1 << _FILTER_BITS, dtype=bool)
    marked[keys >> shift] = True
    return np.flatnonzero(marked[hashes >> shift])
