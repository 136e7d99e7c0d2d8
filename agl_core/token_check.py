"""Whether recorded tokens can be what a policy sampled. Pure functions.

An id that the policy has no token for, or a log-prob that is no probability's, ends an update; so
the model server's answer is held against this where it is recorded, and every attempt where it is
judged, whoever recorded its spans. The size of the vocabulary stands with a rollout set's resources
(`agl_core.ledger.rollout_set`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agl_core import semconv

_MAX_ID = 2**31 - 1
"""The largest id that the ledger's int32 columns hold, far above any vocabulary."""
_ROUNDING = 1e-3
"""How far above 0 the log-prob of a certain token may come, by rounding."""


def find_impossible(attributes: Mapping[str, Any], vocabulary_size: int | None) -> str | None:
    """Return why the ids or log-probs of a recorded call cannot be a policy's, or None.

    Args:
        attributes: Of the call's span; what is absent is not judged.
        vocabulary_size: Rows of the policy's embedding; None where that is not known.
    """
    for name, what in (
        (semconv.PROMPT_TOKEN_IDS, "prompt"),
        (semconv.RESPONSE_TOKEN_IDS, "response"),
    ):
        if reason := find_impossible_id(attributes.get(name), vocabulary_size):
            return f"{what} token ids: {reason}"
    return find_impossible_logprob(attributes.get(semconv.LOGPROBS))


def find_impossible_id(ids: Any, vocabulary_size: int | None = None) -> str | None:
    """Return why ids cannot be tokens of a policy, or None; None for no ids."""
    if ids is None:
        return None
    if not _is_list(ids) or not set(map(type, ids)) <= {int}:
        return "they are not a list of integers"
    size = _MAX_ID + 1 if vocabulary_size is None else vocabulary_size
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return None
    position, wrong = next((at, i) for at, i in enumerate(ids) if not 0 <= i < size)
    of = "any policy" if vocabulary_size is None else f"the policy, whose last one is {size - 1}"
    return f"{wrong} at position {position} is no token of {of}"


def find_impossible_logprob(logprobs: Any) -> str | None:
    """Return why numbers cannot be log-probs, or None; None for none."""
    if logprobs is None:
        return None
    if not _is_list(logprobs) or not set(map(type, logprobs)) <= {int, float}:
        return "the log-probs are not a list of numbers"
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            return f"a log-prob is not finite: {logprob} at position {position}"
        if logprob > _ROUNDING:
            return f"a log-prob is above 0: {logprob:g} at position {position}"
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
