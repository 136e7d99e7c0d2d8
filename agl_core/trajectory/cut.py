"""Limits on the lengths of rows, and cutting what is too long."""

from dataclasses import dataclass

import numpy as np

from agl_core.trajectory.settings import Truncation


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of N lists of tokens."""

    left: np.ndarray
    """[N] tokens cut off at the left."""
    kept: np.ndarray
    """[N] tokens that are left over."""
    note: list[str | None]
    """[N] what was cut, such as `prompt_left`; None where nothing was."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How long one part of N rows may be."""

    part: str
    """`prompt` or `response`."""
    lengths: np.ndarray
    """[N] tokens."""
    limit: int
    """Tokens."""
    policy: Truncation

    def is_exceeded(self, policy: Truncation) -> np.ndarray:
        """Return [N] bool, True where a row is too long and this policy is the one that applies."""
        return (self.lengths > self.limit) & (self.policy == policy)

    def cut(self, in_batch: np.ndarray) -> Cut:
        """Return what is kept of rows that are in the batch ([N] bool); others stay whole."""
        too_many = np.where(in_batch, np.maximum(self.lengths - self.limit, 0), 0)
        left = too_many if self.policy == "left" else np.zeros_like(too_many)
        note = f"{self.part}_{self.policy}"
        return Cut(left, self.lengths - too_many, [note if cut else None for cut in too_many])


def join_notes(one: Cut, other: Cut) -> list[str | None]:
    """Return the notes of both cuts of each row, with a comma between."""
    pairs = zip(one.note, other.note, strict=True)
    return [",".join(filter(None, pair)) or None for pair in pairs]
