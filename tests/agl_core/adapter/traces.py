"""Small traces for the tests of adapters."""

import json
from typing import Any

from agl_core import semconv
from agl_core.types.tracer import Span, TraceStatus

TRACE = "0" * 31 + "1"


def make_span(
    span_id: str,
    start: float | None = 0.0,
    end: float | None = 1.0,
    *,
    name: str = "work",
    parent: str | None = None,
    attributes: dict[str, Any] | None = None,
    sequence_id: int = 0,
    status: str = "OK",
) -> Span:
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=sequence_id,
        trace_id=TRACE,
        span_id=span_id,
        parent_id=parent,
        name=name,
        status=TraceStatus(status_code=status),
        attributes=attributes or {},
        start_time=start,
        end_time=end,
    )


def make_agent(span_id: str, start: float, end: float, name: str, parent: str | None = None):
    attributes = {"agent.name": name}
    return make_span(span_id, start, end, name="agent", parent=parent, attributes=attributes)


def make_llm_span(span_id: str, start: float | None = 0.0, end: float | None = 1.0, **given: Any):
    """A call as an instrumentation of OpenAI's client records it, answered with the id `r-<id>`."""
    attributes = {
        "gen_ai.request.model": "m",
        "gen_ai.response.id": f"r-{span_id}",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": f"ask {span_id}",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": f"answer {span_id}",
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3],
        **given.pop("attributes", {}),
    }
    kept = {name: value for name, value in attributes.items() if value is not None}
    return make_span(
        span_id, start, end, name=given.pop("name", semconv.LLM_CALL_SPAN), attributes=kept, **given
    )


def make_proxy_span(span_id: str, call_index: int, start: float, end: float, **given: Any) -> Span:
    """A call as our proxy records it."""
    attributes = {
        semconv.OPERATION: "chat",
        semconv.REQUEST_MODEL: "m",
        semconv.INPUT_MESSAGES: json.dumps([{"role": "user", "content": f"ask {span_id}"}]),
        semconv.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": "yes"}]),
        semconv.RESPONSE_ID: f"r-{span_id}",
        semconv.PROMPT_TOKEN_IDS: [1, 2],
        semconv.RESPONSE_TOKEN_IDS: [3, 4],
        semconv.LOGPROBS: [-0.5, -0.25],
        semconv.POLICY_VERSION: "v000003",
        semconv.CALL_INDEX: call_index,
        **given.pop("attributes", {}),
    }
    kept = {name: value for name, value in attributes.items() if value is not None}
    return make_span(span_id, start, end, name=semconv.LLM_CALL_SPAN, attributes=kept, **given)


def make_reward(span_id: str, time: float | None, value: float, **given: Any) -> Span:
    attributes = {
        semconv.PRIMARY_REWARD_NAME: "primary",
        semconv.PRIMARY_REWARD_VALUE: value,
        **given.pop("attributes", {}),
    }
    return make_span(
        span_id, time, time, name=semconv.ANNOTATION_SPAN, attributes=attributes, **given
    )


def make_link(number: int, name: str, value: str) -> dict[str, str]:
    prefix = f"agentlightning.link.{number}"
    return {f"{prefix}.key_match": name, f"{prefix}.value_match": value}
