"""One attribute set for each dialect, as its writers document it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import semconv
from agl_core.adapter.llm_call import Dialect, Tokens, find_dialect, read_llm_call, read_tokens
from agl_core.llm_proxy.capture import request_attributes, response_attributes
from tests.agl_core.adapter.traces import make_span

COMPLETION = {
    "id": "chatcmpl-1",
    "model": "m-1",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "4"},
            "token_ids": [3, 4],
            "logprobs": {"content": [{"token": "4", "logprob": -0.5}, {"logprob": -0.25}]},
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
}
"""An answer of vLLM with `return_token_ids` and `logprobs`."""
ASKED = [{"role": "user", "content": "2+2?"}]
SAID = [{"role": "assistant", "content": "4"}]
FULL = Tokens([1, 2], [3, 4], [-0.5, -0.25])

OURS = request_attributes({"model": "m", "temperature": 0.5, "messages": ASKED})
OURS |= response_attributes(COMPLETION, {"x-agl-policy-version": "v000007"})
OURS |= {semconv.CALL_INDEX: 3}

AGENTOPS = {
    "agentops.span.kind": "llm",
    "gen_ai.system": "OpenAI",
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.response.model": "m-1",
    "gen_ai.usage.prompt_tokens": 2,
    "gen_ai.usage.completion_tokens": 2,
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "2+2?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "4",
    "gen_ai.completion.0.finish_reason": "stop",
    "prompt_token_ids": (1, 2),
    "response_token_ids": (3, 4),
    "logprobs.content": json.dumps(COMPLETION["choices"][0]["logprobs"]["content"]),
}

LITELLM_RAW = {
    "llm.hosted_vllm.id": "chatcmpl-1",
    "llm.hosted_vllm.model": "m-1",
    "llm.hosted_vllm.prompt_token_ids": "[1, 2]",
    "llm.hosted_vllm.choices": str(COMPLETION["choices"]),
}
LITELLM_REQUEST = {
    "gen_ai.request.model": "m",
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "2+2?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "4",
    "prompt_token_ids": "[1, 2]",
    "response_token_ids": "[[3, 4]]",
}

OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.invocation_parameters": '{"temperature": 0.5}',
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "2+2?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "4",
    "llm.token_count.prompt": 2,
    "llm.token_count.completion": 2,
    "llm.token_count.total": 4,
    "output.mime_type": "application/json",
    "output.value": json.dumps(COMPLETION),
}

OPENLLMETRY = {
    "traceloop.workflow.name": "w",
    "llm.request.type": "chat",
    "gen_ai.system": "OpenAI",
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "2+2?",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "4",
    "gen_ai.usage.prompt_tokens": 2,
    "gen_ai.usage.completion_tokens": 2,
}

CURRENT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.usage.input_tokens": 2,
    "gen_ai.usage.output_tokens": 2,
    "gen_ai.input.messages": json.dumps(
        [{"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}]
    ),
    "gen_ai.output.messages": json.dumps(
        [
            {
                "role": "assistant",
                "parts": [{"type": "text", "content": "4"}],
                "finish_reason": "stop",
            }
        ]
    ),
}

OPERATION = {
    "agentlightning.operation.name": "openai.chat.completions.create",
    "agentlightning.operation.output.id": "chatcmpl-1",
    "agentlightning.operation.output.prompt_token_ids": [1, 2],
    "agentlightning.operation.output.choices.0.token_ids": [3, 4],
    "agentlightning.operation.output.choices.0.logprobs.content.0.logprob": -0.5,
    "agentlightning.operation.output.choices.0.logprobs.content.1.logprob": -0.25,
}
OPERATION_FIELDS = {
    "agentlightning.operation.output.prompt_token_ids.0": 1,
    "agentlightning.operation.output.prompt_token_ids.1": 2,
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids": [3, 4],
}

DIALECTS = [
    (Dialect.AGL, "openai.chat.completion", OURS, FULL),
    (Dialect.FLAT_GEN_AI, "openai.chat.completion", AGENTOPS, FULL),
    (Dialect.LITELLM, "raw_gen_ai_request", LITELLM_RAW, FULL),
    (Dialect.LITELLM, "litellm_request", LITELLM_REQUEST, Tokens([1, 2], [3, 4])),
    (Dialect.OPENINFERENCE, "ChatCompletion", OPENINFERENCE, FULL),
    (Dialect.FLAT_GEN_AI, "openai.chat", OPENLLMETRY, Tokens()),
    (Dialect.GEN_AI, "chat m", CURRENT, Tokens()),
    (Dialect.OPERATION, "agentlightning.operation", OPERATION, FULL),
    (Dialect.OPERATION, "agentlightning.operation", OPERATION_FIELDS, Tokens([1, 2], [3, 4])),
]


@pytest.mark.parametrize(("dialect", "name", "attributes", "tokens"), DIALECTS)
def test_each_dialect_is_told_apart_and_its_tokens_are_read(
    dialect: Dialect, name: str, attributes: dict[str, Any], tokens: Tokens
):
    call = read_llm_call(make_span("s", name=name, attributes=attributes))
    assert call is not None
    assert call.dialect is dialect
    assert call.tokens == tokens
    assert call.response_id == (None if attributes is OPERATION_FIELDS else "chatcmpl-1")


@pytest.mark.parametrize(
    "attributes", [OURS, AGENTOPS, LITELLM_REQUEST, OPENINFERENCE, OPENLLMETRY, CURRENT]
)
def test_each_dialect_with_text_tells_the_same_chat(attributes: dict[str, Any]):
    call = read_llm_call(make_span("s", name="litellm_request", attributes=attributes))
    assert call is not None
    assert call.chat.prompt == ASKED
    said = [{k: m[k] for k in m if k != "finish_reason"} for m in call.chat.completions]
    assert said == SAID
    assert call.request["model"] == "m"
    if attributes is not LITELLM_REQUEST:
        assert call.request["temperature"] == 0.5
        assert (call.prompt_tokens, call.completion_tokens) == (2, 2)


def test_our_proxys_call_has_its_number_and_policy():
    call = read_llm_call(make_span("s", attributes=OURS))
    assert call is not None
    assert (call.call_index, call.policy_version) == (3, "v000007")


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "t"},
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": "[]"},
        {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "m"},
        {"openinference.span.kind": "CHAIN", "llm.input_messages.0.message.role": "user"},
        {"agent.name": "a"},
        {"agentlightning.operation.output.value": 3},
        {"agentlightning.reward.0.value": 1.0},
    ],
)
def test_other_spans_are_no_calls(attributes: dict[str, Any]):
    assert find_dialect(make_span("s", attributes=attributes)) is None


def test_logprobs_pair_up_with_ids_or_are_none():
    ids = {"prompt_token_ids": [1], "response_token_ids": [3, 4]}
    assert read_tokens(ids | {"logprobs.content": [-0.5, -1]}).logprobs == [-0.5, -1.0]
    assert read_tokens(ids | {"logprobs.content": [-0.5]}).logprobs is None
    assert read_tokens(ids | {"logprobs.content": "broken"}).logprobs is None
    assert read_tokens(ids | {"logprobs.content": ['{"logprob": null}'] * 2}).logprobs is None


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
names = sorted({name for _, _, attributes, _ in DIALECTS for name in attributes})


@given(st.dictionaries(st.sampled_from(names), junk | junk.map(json.dumps) | junk.map(str)))
def test_no_attribute_is_an_error(attributes: dict[str, Any]):
    read_llm_call(make_span("s", name="raw_gen_ai_request", attributes=attributes))
