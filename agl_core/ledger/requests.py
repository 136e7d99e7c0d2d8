"""A proposal's rollout requests as a table, with ids and seeds that a rerun gives again."""

import hashlib
from collections.abc import Sequence

import pyarrow as pa

from agl_core.ledger.tables import REQUESTS
from agl_core.types.training import Proposal


def requests_table(
    proposal: Proposal,
    inputs: dict[str, Sequence[str]],
    *,
    run_id: str,
    iteration: int,
    rollout_set: str,
    seed: int,
) -> pa.Table:
    """Return one row for each requested rollout (schema `REQUESTS`).

    Rollout ids depend on run, iteration, set and position; sampling seeds do not depend on the run,
    so that a run can be repeated. Validation rollouts keep their seeds from version to version.

    Args:
        proposal: What to run.
        inputs: Rows of the `train` and `val` datasets as JSON.
        run_id: Of the run.
        iteration: Number of the iteration.
        rollout_set: Name of the set.
        seed: Of the run.
    """
    rows = [
        {
            "index": index,
            "rollout_id": "ro-" + _hash(f"{run_id}/{iteration}/{rollout_set}/{index}")[:12],
            "dataset": request.dataset,
            "row": request.row,
            "group": request.group,
            "sample": request.sample,
            "mode": request.mode,
            "seed": _seed(seed, iteration if request.mode == "train" else -1, index),
            "input": inputs[request.dataset][request.row],
        }
        for index, request in enumerate(proposal.requests)
    ]
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _seed(*parts: int) -> int:
    """Return a 63-bit seed."""
    return int(_hash("/".join(map(str, parts)))[:16], 16) >> 1
