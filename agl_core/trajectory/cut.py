"""Cutting what is too long."""

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


def cut_long(
    part: str, lengths: np.ndarray, limit: int, policy: Truncation, in_batch: np.ndarray
) -> Cut:
    """Return what is kept of rows that are in the batch; others stay whole.

    Args:
        part: `prompt` or `response`, for the note.
        lengths: [N]
        limit: Tokens.
        policy: Rows that it drops or refuses are not in the batch.
        in_batch: [N] bool.
    """
    too_many = np.where(in_batch, np.maximum(lengths - limit, 0), 0)
    left = too_many if policy == "left" else np.zeros_like(too_many)
    note = f"{part}_{policy}"
    return Cut(left, lengths - too_many, [note if cut else None for cut in too_many])


def join_notes(one: Cut, other: Cut) -> list[str | None]:
    """Return the notes of both cuts of each row, with a comma between."""
    pairs = zip(one.note, other.note, strict=True)
    return [",".join(filter(None, pair)) or None for pair in pairs]
