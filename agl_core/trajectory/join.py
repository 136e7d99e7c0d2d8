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
    shared = np.zeros(len(prompts), dtype=np.int64)
    forked = np.zeros(len(prompts), dtype=bool)
    before = np.full(len(prompts), -1)
    for low, high in _blocks(prompts.lengths, rollout):
        found = _search(prompts, responses, rollout, slice(low, high))
        open_calls: dict[int, list[int]] = {}  # by their contexts
        for call in (low + np.flatnonzero(comparable[low:high])).tolist():
            for key in found.keys_of(call - low):
                contexts = open_calls.get(key)
                if contexts and _continues(prompts, responses, call, contexts[-1]):
                    before[call] = context = contexts.pop()
                    shared[call] = prompts.lengths[context] + responses.lengths[context]
                    break
                forked[call] |= contexts is not None and not contexts
            open_calls.setdefault(found.own_key[call - low], []).append(call)
    return Joins(_number_rows(before), shared, forked & (before < 0))


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


@dataclass(frozen=True, slots=True)
class _Found:
    """Which contexts the prompts of some calls start with, by hash. Equal contexts have one key."""

    own_key: list[int]
    """Of each call's own context."""
    keys: list[int]
    """Of the contexts that a prompt starts with, longest first, of all calls in turn."""
    ends: list[int]
    """Where each call's part of `keys` ends."""

    def keys_of(self, call: int) -> list[int]:
        return self.keys[self.ends[call - 1] if call else 0 : self.ends[call]]


def _search(prompts: Ragged, responses: Ragged, rollout: np.ndarray, block: slice) -> _Found:
    """Compare the hash of every prefix of every prompt with the hashes of the contexts."""
    longest = int((prompts.lengths + responses.lengths)[block].max())
    generator = np.random.default_rng(0)  # any constants do: joins are compared id by id
    factors = generator.integers(1 << 63, size=longest, dtype=np.uint64) | np.uint64(1)
    _, salts = np.unique(rollout[block], return_inverse=True)
    salts = (salts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    prefixes, contexts = _hashes(prompts, responses, block, factors, salts)
    hashes, own_key = np.unique(contexts, return_inverse=True)
    places = _places_of(prefixes, hashes)
    keys = np.minimum(np.searchsorted(hashes, prefixes[places]), len(hashes) - 1)
    is_there = hashes[keys] == prefixes[places]
    starts = starts_of(prompts.lengths[block])
    calls = np.searchsorted(starts, places[is_there], side="right") - 1
    order = np.lexsort((-places[is_there], calls))
    ends = np.cumsum(np.bincount(calls, minlength=len(own_key)))
    return _Found(own_key.tolist(), keys[is_there][order].tolist(), ends.tolist())


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
