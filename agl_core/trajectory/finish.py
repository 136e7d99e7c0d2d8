"""Whether a response ended before the policy ended it.

Decided by its tokens: for the same cut one server says `length` and another `tool_calls`, and a
server that gave up says `abort`::

    limit 4   1 2 3 4     cut off: it has all tokens of the limit, and 4 ends nothing
    limit 4   1 2 3 end   whole
    limit 4   1 2 3       whole if a stop text may have ended it, or the policy's ends are unknown
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agl_core.ledger.tables import TRIPLETS, column
from agl_core.trajectory.ragged import Ragged

_CUT = pa.array(["length", "abort", "error"])
"""Finish reasons of a response that did not end by itself. Other reasons prove nothing."""


def find_cut_short(triplets: pa.Table, responses: Ragged, end_ids: frozenset[int]) -> np.ndarray:
    """Return [C] bool, whether each response was cut off.

    A response that ends with one of `end_ids` is whole, whatever the server calls it. Any other one
    is cut off if it has as many tokens as its call permitted, if the server says so, or if nothing
    but an end token could have ended it.

    Args:
        triplets: Schema `TRIPLETS`, C rows.
        responses: [C] ids, at least one each.
        end_ids: Tokens by which the policy ends a response; empty if they are not known.
    """
    limits = pc.fill_null(column(triplets, "max_tokens", TRIPLETS), 0).to_numpy()
    is_at_limit = (limits > 0) & (responses.lengths >= limits)
    is_said = pc.is_in(triplets["finish_reason"], value_set=_CUT).to_numpy()
    cut = is_at_limit | is_said
    if not end_ids:
        return cut
    last = responses.values[responses.starts + responses.lengths - 1]
    sampling = pc.fill_null(column(triplets, "sampling", TRIPLETS), '"stop"')
    has_stop = pc.match_substring(sampling, '"stop').to_numpy()  # texts or token ids
    return (cut | ~has_stop) & ~np.isin(last, sorted(end_ids))
