"""Small values for tests, with only what a test cares about spelled out."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pyarrow as pa

from agl_core import semconv
from agl_core.ledger.tables import BATCH_ROWS, OUTCOMES, REQUESTS, SPANS, TRIPLETS
from agl_core.types.training import PolicyRef, Proposal, RolloutRequest

POLICY = PolicyRef(version="v000000", weights_digest="sha256:aa", path="/nowhere")


def make_proposal(num_groups: int = 2, samples: int = 2, policy: PolicyRef = POLICY) -> Proposal:
    requests = [
        RolloutRequest(dataset="train", row=group, group=group, sample=sample, mode="train")
        for group in range(num_groups)
        for sample in range(samples)
    ]
    return Proposal(
        policy=policy, sampling_parameters={"temperature": 1.0}, requests=tuple(requests)
    )


def make_requests(count: int, samples: int = 2) -> pa.Table:
    rows = [
        {
            "index": index,
            "rollout_id": f"ro-{index}",
            "dataset": "train",
            "row": index // samples,
            "group": index // samples,
            "sample": index % samples,
            "mode": "train",
            "seed": index,
            "input": "{}",
        }
        for index in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=REQUESTS)


def make_outcomes(*rows: dict[str, Any]) -> pa.Table:
    """Outcomes; each row gives at least `index`."""
    defaults = {
        "attempt": 1,
        "kind": "succeeded",
        "reward": 1.0,
        "message": "",
        "traceback": "",
        "started": 0.0,
        "duration_seconds": 1.0,
        "num_calls": 1,
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "annotations": "{}",
        "final": True,
    }
    filled = [
        {
            **defaults,
            "rollout_id": f"ro-{row['index']}",
            "attempt_id": f"at-{row['index']}-{row.get('attempt', 1)}",
            **row,
        }
        for row in rows
    ]
    return pa.Table.from_pylist(filled, schema=OUTCOMES)


def make_call(index: int, call_index: int = 0, **overrides: Any) -> dict[str, Any]:
    """One span of a model call."""
    return {
        "index": index,
        "rollout_id": f"ro-{index}",
        "attempt_id": f"at-{index}-1",
        "sequence_id": call_index + 2,
        "trace_id": bytes(16),
        "span_id": bytes([index, call_index, 0, 0, 0, 0, 0, 1]),
        "name": semconv.LLM_CALL_SPAN,
        "status": "OK",
        "start_time": float(call_index),
        "end_time": call_index + 0.5,
        "policy_version": "v000000",
        "weights_digest": "sha256:aa",
        "call_index": call_index,
        "temperature": 1.0,
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4],
        "logprobs": [-0.5, -0.25],
        "attributes": "{}",
        "events": "[]",
    } | overrides


def make_spans(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SPANS)


def make_triplets(*rows: dict[str, Any]) -> pa.Table:
    """Triplets; each row gives at least `index` and `group`."""
    defaults = {
        "call_index": 0,
        "span_id": bytes(8),
        "prompt_ids": [1, 2],
        "response_ids": [3, 4],
        "logprobs": [-0.5, -0.25],
        "reward": 1.0,
        "rewards": [],
        "policy_version": "v000000",
        "temperature": 1.0,
        "finish_reason": "stop",
    }
    filled = [{**defaults, "rollout_id": f"ro-{row['index']}", **row} for row in rows]
    return pa.Table.from_pylist(filled, schema=TRIPLETS)


def make_rows(indices: Sequence[int], reasons: Sequence[str | None]) -> pa.Table:
    rows = [
        {
            "row": row,
            "index": index,
            "group": index // 2,
            "response_mask": [1],
            "drop_reason": reason,
        }
        for row, (index, reason) in enumerate(zip(indices, reasons, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=BATCH_ROWS)


def dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def statuses_for_a_page(url: str) -> list[int]:
    """Return what a server answers to what a web page can have a browser send."""
    pages = [
        {"host": "page.example"},
        {"origin": "http://page.example"},
        {"sec-fetch-site": "cross-site"},
        {"content-type": "text/plain"},
    ]
    json = {"content-type": "application/json"}
    with httpx.Client(trust_env=False) as http:
        return [http.post(url, content=b"{}", headers=json | page).status_code for page in pages]
