"""How many spans a second become triplets, and that the time grows with the spans only: the
pipeline's path over tables, and the adapter of one attempt's spans.

python -m benchmarks.adapter
"""

import time

import numpy as np
import pyarrow as pa

from agl_core import semconv
from agl_core.adapter.columns import spans_to_triplets
from agl_core.adapter.triplet import TracerTraceToTriplet
from agl_core.ledger.tables import OUTCOMES, SPANS
from agl_core.trajectory.batch import build_batch
from agl_core.trajectory.settings import BatchSettings
from agl_core.types.tracer import Span

CALLS = 8
PROMPT, RESPONSE = 1000, 100
"""Tokens of a call."""


def token_lists(rows: int, length: int, kind: pa.DataType) -> pa.Array:
    """Return lists of equal length with arbitrary values."""
    values = pa.array(np.arange(rows * length) % 1000).cast(kind)
    offsets = pa.array(np.arange(rows + 1) * length, pa.int32())
    return pa.ListArray.from_arrays(offsets, values)


def make_tables(rollouts: int) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Return spans, outcomes and groups of some rollouts of `CALLS` calls."""
    index = np.repeat(np.arange(rollouts), CALLS)
    rows = len(index)
    columns = {
        "index": index,
        "rollout_id": [f"ro-{i}" for i in index],
        "attempt_id": [f"at-{i}" for i in index],
        "name": [semconv.LLM_CALL_SPAN] * rows,
        "status": ["OK"] * rows,
        "call_index": np.tile(np.arange(CALLS), rollouts),
        "span_id": [int(i).to_bytes(8, "big") for i in range(rows)],
        "policy_version": ["v000000"] * rows,
        "temperature": np.ones(rows),
        "prompt_token_ids": token_lists(rows, PROMPT, pa.int32()),
        "response_token_ids": token_lists(rows, RESPONSE, pa.int32()),
        "logprobs": token_lists(rows, RESPONSE, pa.float32()),
    }
    spans = pa.table(
        {f.name: pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(rows, f.type)
         for f in SPANS}
    )  # fmt: skip
    filled = {
        "index": np.arange(rollouts),
        "rollout_id": [f"ro-{i}" for i in range(rollouts)],
        "attempt_id": [f"at-{i}" for i in range(rollouts)],
        "kind": ["succeeded"] * rollouts,
        "reward": np.ones(rollouts),
        "final": [True] * rollouts,
    }
    outcomes = pa.table(
        {f.name: pa.array(filled[f.name], f.type) if f.name in filled
         else pa.nulls(rollouts, f.type) for f in OUTCOMES}
    )  # fmt: skip
    groups = pa.table({"index": np.arange(rollouts), "group": np.arange(rollouts) // 8})
    return spans, outcomes, groups.cast(pa.schema([("index", pa.int32()), ("group", pa.int32())]))


def make_flat_trace(calls: int) -> list[Span]:
    """Return one attempt: an agent, and beside it calls with 20 + 10 tokens that float."""
    ids = {"rollout_id": "ro-1", "attempt_id": "at-1", "trace_id": "0" * 31 + "1"}
    agent = Span.from_attributes(
        **ids, attributes={"agent.name": "solver"}, name="agent", start_time=0.0, end_time=calls + 1
    )
    flat = [
        Span.from_attributes(
            **ids,
            name=semconv.LLM_CALL_SPAN,
            sequence_id=number,
            start_time=float(number),
            end_time=number + 0.5,
            attributes={
                semconv.RESPONSE_ID: f"r-{number}",
                "gen_ai.prompt.0.role": "user",
                "gen_ai.prompt.0.content": "question",
                "gen_ai.completion.0.role": "assistant",
                "gen_ai.completion.0.content": "answer",
                "prompt_token_ids": list(range(20)),
                "response_token_ids": list(range(10)),
            },
        )
        for number in range(calls)
    ]
    rewards = [
        Span.from_attributes(
            **ids,
            name=semconv.ANNOTATION_SPAN,
            start_time=number + 0.75,
            attributes={semconv.PRIMARY_REWARD_VALUE: 1.0},
        )
        for number in range(0, calls, 10)
    ]
    return [*flat, *rewards, agent]


def time_tables() -> None:
    """Print the rates of the pipeline's path."""
    for rollouts in (250, 500, 1000, 2000):
        spans, outcomes, groups = make_tables(rollouts)
        settings = BatchSettings(
            max_prompt_length=PROMPT, max_response_length=RESPONSE, temperature=1.0
        )
        started = time.perf_counter()
        triplets = spans_to_triplets(spans, outcomes, groups)
        adapted = time.perf_counter()
        rows = build_batch(triplets, settings).rows
        built = time.perf_counter()
        print(
            f"{len(spans):6} calls of {PROMPT}+{RESPONSE} tokens: "
            f"{len(triplets) / (adapted - started):10.0f} triplets/s, "
            f"{len(rows) / (built - adapted):10.0f} rows/s"
        )


def time_traces() -> None:
    """Print the CPU time of one attempt's adapter, with and without repair of the hierarchy."""
    for calls in (800, 3200, 12800):
        spans = make_flat_trace(calls)
        seconds: dict[bool, float] = {}
        for repair in (True, False):
            adapter = TracerTraceToTriplet(repair_hierarchy=repair)
            started = time.process_time()
            triplets = adapter.adapt(spans)
            seconds[repair] = time.process_time() - started
            assert len(triplets) == calls
        print(
            f"{calls:6} flat calls in one attempt: {seconds[True]:6.3f} s, "
            f"{calls / seconds[True]:6.0f} calls/s; without repair {seconds[False]:6.3f} s"
        )


def main() -> None:
    """Print rates for growing inputs; a constant rate is linear growth."""
    time_tables()
    time_traces()


if __name__ == "__main__":
    main()
