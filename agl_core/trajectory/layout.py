"""Where the tokens of calls go in the responses of rows: positions, before anything is cut."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.tables import TRIPLETS, column
from agl_core.sampling import is_sampled_by
from agl_core.trajectory.finish import find_cut_short
from agl_core.trajectory.join import Joins
from agl_core.trajectory.ragged import Ragged, ranges, starts_of, take_ranges
from agl_core.trajectory.settings import BatchSettings


@dataclass(frozen=True, slots=True)
class CallColumns:
    """The columns of C triplets, with R response tokens in all."""

    index: np.ndarray
    """[C] of the rollout, ascending."""
    group: np.ndarray
    """[C]"""
    temperature: np.ndarray
    """[C] at which the call was sampled."""
    prompts: Ragged
    """[C] ids."""
    responses: Ragged
    """[C] ids."""
    logprobs: np.ndarray
    """[R] float32, nats."""
    is_cut_short: np.ndarray
    """[C] bool, whether the response ended before the policy ended it."""
    is_sampled_as_asked: np.ndarray
    """[C] bool, whether only the run's own fields changed the distribution."""
    versions: pa.DictionaryArray
    """[C] policy versions; empty where none was recorded."""

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def read(
        cls, triplets: pa.Table, settings: BatchSettings, end_ids: frozenset[int]
    ) -> "CallColumns":
        """Read triplets (schema `TRIPLETS`); a call without a temperature was sampled at 1.

        Args:
            triplets: Of some rollouts.
            settings: Say how the run samples.
            end_ids: Tokens by which the policy ends a response; empty if they are not known.
        """
        versions = pc.fill_null(triplets["policy_version"], "").combine_chunks()
        prompts = Ragged.from_column(triplets["prompt_ids"])
        responses = Ragged.from_column(triplets["response_ids"])
        return cls(
            index=triplets["index"].to_numpy(),
            group=triplets["group"].to_numpy(),
            temperature=pc.fill_null(triplets["temperature"], 1.0).to_numpy(),
            prompts=prompts,
            responses=responses,
            logprobs=Ragged.from_column(triplets["logprobs"]).values,
            is_cut_short=find_cut_short(triplets, responses, end_ids),
            is_sampled_as_asked=_is_sampled_as_asked(triplets, settings),
            versions=pc.dictionary_encode(versions),
        )


def _is_sampled_as_asked(triplets: pa.Table, settings: BatchSettings) -> np.ndarray:
    """Return [C] bool; few calls differ in what was recorded, so each value is judged once."""
    recorded = column(triplets, "sampling", TRIPLETS).combine_chunks()
    encoded = pc.dictionary_encode(recorded, null_encoding="encode")
    judged = [
        is_sampled_by(text, settings.sampling, settings.allowed_sampling)
        for text in encoded.dictionary.to_pylist()
    ]
    return np.asarray(judged, dtype=bool)[encoded.indices.to_numpy()]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """N rows of C calls. Columns over calls are ordered by row, then by time; T is the number of
    response tokens of all rows.
    """

    calls: np.ndarray
    """[C] place of each call among the triplets."""
    row: np.ndarray
    """[C] that each call is in."""
    begins: np.ndarray
    """[N] where the calls of each row begin."""
    lengths: np.ndarray
    """[N] tokens of each response."""
    num_shared: np.ndarray
    """[C] prompt tokens that the row had before; 0 for its first call."""
    num_observed: np.ndarray
    """[C] prompt tokens that the call adds to the response."""
    num_sampled: np.ndarray
    """[C]"""
    sampled_starts: np.ndarray
    """[C] where the call's sampled tokens start among the T."""

    @classmethod
    def of(cls, calls: CallColumns, joins: Joins) -> "RowLayout":
        """Return the layout of joined calls."""
        order = np.argsort(joins.row, kind="stable")
        row, shared = joins.row[order], joins.shared[order]
        observed = np.where(shared > 0, calls.prompts.lengths[order] - shared, 0)
        sampled = calls.responses.lengths[order]
        lengths = np.bincount(row, observed + sampled, minlength=joins.num_rows)
        return cls(
            calls=order,
            row=row,
            begins=np.flatnonzero(np.diff(row, prepend=-1)),
            lengths=lengths.astype(np.int64),
            num_shared=shared,
            num_observed=observed,
            num_sampled=sampled,
            sampled_starts=starts_of(observed + sampled) + observed,
        )

    @property
    def first(self) -> np.ndarray:
        """[N] place of each row's first call among the triplets."""
        return self.calls[self.begins]

    @property
    def num_calls(self) -> np.ndarray:
        """[N] calls of each row."""
        return np.diff(self.begins, append=len(self.calls))

    @property
    def last(self) -> np.ndarray:
        """[N] place of each row's last call among the triplets."""
        return self.calls[self.begins + self.num_calls - 1]

    def is_sampled(self) -> np.ndarray:
        """Return [T] bool, False where an observation is."""
        parts = np.stack([self.num_observed, self.num_sampled], axis=1).ravel()
        return np.repeat(np.tile([False, True], len(self.calls)), parts)

    def spread(self, calls: CallColumns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids [T], log-probs [T] (0 where not sampled), and version codes [T] (there -1)."""
        sampled = self.is_sampled()
        starts = calls.responses.starts[self.calls]
        codes = calls.versions.indices.to_numpy()[self.calls].astype(np.int32)
        ids, logprobs = (
            take_ranges(values, starts, self.num_sampled)
            for values in (calls.responses.values, calls.logprobs)
        )
        codes = np.repeat(codes, self.num_sampled)
        if sampled.all():
            return ids, logprobs, codes
        observed = ranges(calls.prompts.starts[self.calls] + self.num_shared, self.num_observed)
        all_ids = np.empty(len(sampled), dtype=ids.dtype)
        all_ids[sampled] = ids
        all_ids[~sampled] = calls.prompts.values[observed]
        all_logprobs = np.zeros(len(sampled), dtype=np.float32)
        all_logprobs[sampled] = logprobs
        all_codes = np.full(len(sampled), -1, dtype=np.int32)
        all_codes[sampled] = codes
        return all_ids, all_logprobs, all_codes
