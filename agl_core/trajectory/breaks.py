"""Why a call did not continue what its rollout had so far.

A call that starts a row is compared with the row that shares most of its prompt, up to the first
token that differs::

    row so far   1 2 3 4 5       the model wrote 4 5
    prompt       1 2 3 9 6       differs at position 3: expected 4, found 9
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import pyarrow as pa

from agl_core.ledger.tables import BREAKS
from agl_core.trajectory.join import Joins
from agl_core.trajectory.ragged import Ragged

_MAX_COMPARED = 32
"""Rows that a call is compared with, those that grew last."""
_SHARED_TOKENS = 8
"""Tokens before the difference that are decoded too: the text of a token may need them."""


class BreakKind(StrEnum):
    """Why a call starts a row though its rollout has one."""

    BRANCH = "branch"
    """No fault of the ids: it continues a context that another call had continued already, or goes
    back to an earlier point."""
    TEMPLATE = "template"
    """The token that differs is one of the chat template, on either side."""
    RETOKENISED = "retokenised"
    """The same text with other ids: the model's answer was tokenised again."""
    OTHER = "other"
    """Another text (another agent, say), or what cannot be told without a tokenizer."""


class Vocabulary(Protocol):
    """What is known of token ids."""

    def is_special(self, token_id: int) -> bool:
        """Say whether a token is special, so written by a template and not by tokenising text."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of some tokens, special ones included."""
        ...


@dataclass(frozen=True, slots=True)
class Break:
    """A call that starts a row though its rollout has one."""

    call: int
    kind: BreakKind
    position: int | None = None
    """Of the first token that differs, in the call's prompt; None where none does."""
    expected_id: int | None = None
    """What the row so far has there."""
    found_id: int | None = None
    """What the prompt has there."""


def find_breaks(
    prompts: Ragged,
    responses: Ragged,
    rollout: np.ndarray,
    joins: Joins,
    comparable: np.ndarray,
    vocabulary: Vocabulary | None,
) -> list[Break]:
    """Return the breaks in the order of the calls.

    Args:
        prompts: [C] ids.
        responses: [C] ids.
        rollout: [C] ascending.
        joins: Of these calls.
        comparable: [C] bool, calls that take part.
        vocabulary: Of the policy; None tells branches from other breaks only.
    """
    breaks: list[Break] = []
    for call, tails in _starts(rollout, joins, comparable):
        shared = [_shared_length(prompts, responses, call, tail) for tail in tails]
        position = max(shared)
        nearest = tails[shared.index(position)]
        context = np.concatenate([prompts[nearest], responses[nearest]])
        prompt = prompts[call]
        if position in (len(prompt), len(context)):
            breaks.append(Break(call, BreakKind.BRANCH))
            continue
        in_prompt = position < prompts.lengths[nearest]
        kind = _kind(prompt, context, position, bool(joins.forked[call] and in_prompt), vocabulary)
        breaks.append(Break(call, kind, position, int(context[position]), int(prompt[position])))
    return breaks


def breaks_table(breaks: list[Break], joins: Joins, triplets: pa.Table) -> pa.Table:
    """Return breaks as a table (schema `BREAKS`)."""
    calls = [found.call for found in breaks]
    named = triplets.select(["index", "rollout_id", "call_index"]).take(pa.array(calls, pa.int64()))
    return pa.table(
        [
            pa.array(joins.row[calls], pa.int32()),
            *named.columns,
            pa.array([found.kind.value for found in breaks], pa.string()),
            pa.array([found.position for found in breaks], pa.int32()),
            pa.array([found.expected_id for found in breaks], pa.int32()),
            pa.array([found.found_id for found in breaks], pa.int32()),
        ],
        schema=BREAKS,
    )


def count_breaks(table: pa.Table) -> dict[str, int]:
    """Return how many breaks there are of each kind (schema `BREAKS`), those of none included."""
    found = Counter(table["kind"].to_pylist())
    return {kind.value: found[kind.value] for kind in BreakKind}


def _starts(
    rollout: np.ndarray, joins: Joins, comparable: np.ndarray
) -> Iterator[tuple[int, list[int]]]:
    """Yield calls that start a row, with the last calls of their rollout's rows, latest first."""
    tails: dict[int, int] = {}
    current = None
    for call in np.flatnonzero(comparable).tolist():
        if rollout[call] != current:
            current = rollout[call]
            tails = {}
        elif not joins.shared[call]:
            yield call, list(tails.values())[: -_MAX_COMPARED - 1 : -1]
        tails.pop(int(joins.row[call]), None)
        tails[int(joins.row[call])] = call


def _shared_length(prompts: Ragged, responses: Ragged, call: int, context: int) -> int:
    """Return how many leading ids a call's prompt shares with a context."""
    prompt, first = prompts[call], prompts[context]
    shared = common_prefix_length(prompt, first)
    if shared < len(first):
        return shared
    return shared + common_prefix_length(prompt[shared:], responses[context])


def common_prefix_length(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many leading values two arrays share."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _kind(
    prompt: np.ndarray,
    context: np.ndarray,
    position: int,
    is_fork: bool,
    vocabulary: Vocabulary | None,
) -> BreakKind:
    """Return why a prompt leaves a context at a position.

    Args:
        prompt: Ids.
        context: Ids of the row so far.
        position: Of the first id that differs.
        is_fork: Whether an earlier context is all shared, and what differs is an observation.
        vocabulary: Of the policy.
    """
    ids = int(context[position]), int(prompt[position])
    if vocabulary is not None and any(map(vocabulary.is_special, ids)):
        return BreakKind.TEMPLATE
    if is_fork:
        return BreakKind.BRANCH
    if vocabulary is not None:
        begin = max(0, position - _SHARED_TOKENS)
        text = vocabulary.decode(prompt[begin:].tolist())
        if text.startswith(vocabulary.decode(context[begin:].tolist())):
            return BreakKind.RETOKENISED
    return BreakKind.OTHER
