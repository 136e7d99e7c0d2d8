"""Lists of different lengths as one flat array, with the length of each beside it.

`values=[5, 9, 7]`, `lengths=[2, 1]` is `[[5, 9], [7]]`. N is the number of lists, T that of values.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MAX_VALUES = 2**31 - 1
"""What the offsets of an Arrow list column can count."""


@dataclass(frozen=True)
class Ragged:
    """A column of lists."""

    values: np.ndarray
    """[T]"""
    lengths: np.ndarray
    """[N] int64."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> np.ndarray:
        start = self.starts[position]
        return self.values[start : start + self.lengths[position]]

    @cached_property
    def starts(self) -> np.ndarray:
        """[N] place of each list's first value."""
        return starts_of(self.lengths)

    @classmethod
    def from_column(cls, column: pa.ChunkedArray) -> "Ragged":
        """Read a list column; a null list is an empty one."""
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        flat = pc.list_flatten(column)
        return cls(flat.to_numpy(), lengths)

    def take(self, starts: np.ndarray, lengths: np.ndarray) -> "Ragged":
        """Return stretches of the flat values as lists.

        Args:
            starts: [M] place of each stretch's first value in `values`.
            lengths: [M]
        """
        return Ragged(take_ranges(self.values, starts, lengths), lengths)

    def to_arrow(self) -> pa.Array:
        """Return a list column."""
        return list_array(pa.array(self.values), self.lengths)


def list_array(values: pa.Array, lengths: np.ndarray) -> pa.Array:
    """Return flat values as a list column.

    Raises:
        ValueError: There are more values than a list column can hold.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > _MAX_VALUES:
        raise ValueError(f"{offsets[-1]} tokens in one batch, above {_MAX_VALUES}")
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Return where each list starts in the flat values."""
    return np.cumsum(lengths) - lengths


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return `starts[0], starts[0] + 1, ...` for each length in turn, as one array."""
    return np.arange(lengths.sum()) + np.repeat(starts - starts_of(lengths), lengths)


def take_ranges(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return some stretches of an array one after another; a view where they are one stretch."""
    if len(starts) and np.array_equal(starts[1:], (starts + lengths)[:-1]):
        return values[starts[0] : starts[0] + lengths.sum()]
    return values[ranges(starts, lengths)]
