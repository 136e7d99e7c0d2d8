"""One model call, whatever recorded it: token ids, log-probs, identity and chat.

Dialects, by who writes them: our proxy (`agentlightning.llm.*`); our operations and Weave
(`agentlightning.operation.output.*`, the answer of the model flattened); LiteLLM
(`raw_gen_ai_request` with `llm.hosted_vllm.*` as text, `litellm_request`); OpenInference
(`openinference.span.kind`, `llm.*`); flat `gen_ai.prompt.N.*` with plain `prompt_token_ids`
(AgentOps and other instrumentations of OpenAI's client, OpenLLMetry); current `gen_ai.*`.

Only some of them carry token ids, and only where the server returned them and the client library
kept them. Nothing here makes ids up: a call without them has None.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agl_core import semconv
from agl_core.adapter.attributes import as_dict, as_list, parse_json, parse_literal, unflatten
from agl_core.adapter.chat import FLAT_COMPLETION, FLAT_PROMPT, Chat, read_chat
from agl_core.emitter.reward import to_float
from agl_core.types.tracer import SpanLike

OPERATION_OUTPUT = "agentlightning.operation.output"
LITELLM_RAW_SPAN, LITELLM_SPAN = "raw_gen_ai_request", "litellm_request"
LITELLM_PREFIXES = ("llm.hosted_vllm", "llm.openai")
OPENINFERENCE_KIND = "openinference.span.kind"
OPENINFERENCE_OUTPUT_VALUE = "output.value"
PLAIN_PROMPT_IDS, PLAIN_RESPONSE_IDS = "prompt_token_ids", "response_token_ids"
PLAIN_LOGPROBS = "logprobs.content"
MODEL_OPERATIONS = ("chat", "text_completion", "generate_content")


class Dialect(StrEnum):
    """Who recorded a call."""

    AGL = "agl"
    OPERATION = "operation"
    LITELLM = "litellm"
    OPENINFERENCE = "openinference"
    FLAT_GEN_AI = "flat_gen_ai"
    GEN_AI = "gen_ai"
    UNKNOWN = "unknown"
    """Only the span's name says that it is a model call."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a call's tokens were, as far as it is recorded."""

    prompt_ids: list[int] | None = None
    """[prompt_length] Ids that the model saw."""
    response_ids: list[int] | None = None
    """[response_length] Ids that it sampled."""
    logprobs: list[float] | None = None
    """[response_length] In nats; None unless there is a finite one for each sampled id."""

    @property
    def is_complete(self) -> bool:
        """Whether the call can be trained on: it has prompt and response ids."""
        return bool(self.prompt_ids and self.response_ids)


@dataclass(frozen=True, slots=True)
class LLMCall:
    """One model call."""

    dialect: Dialect
    tokens: Tokens
    response_id: str | None
    """The model server's id of the answer; two spans with the same one record the same call."""
    call_index: int | None
    """0-based number of the call within its attempt, from our proxy."""
    policy_version: str | None
    prompt_tokens: int | None
    """Number of prompt tokens by the server's count."""
    completion_tokens: int | None
    request: dict[str, Any]
    """Model and sampling parameters, by the names of `gen_ai.request.*`."""
    response: dict[str, Any]
    """By the names of `gen_ai.response.*`."""
    chat: Chat


def read_llm_call(span: SpanLike) -> LLMCall | None:
    """Return the model call that a span records, or None if it records something else."""
    dialect = find_dialect(span)
    return None if dialect is None else read_attributes(span.attributes or {}, dialect)


def read_attributes(attributes: Mapping[str, Any], dialect: Dialect) -> LLMCall:
    """Return what a span's attributes say about the model call that it records."""
    return LLMCall(
        dialect=dialect,
        tokens=read_tokens(attributes),
        response_id=read_response_id(attributes),
        call_index=_integer(attributes, semconv.CALL_INDEX),
        policy_version=_text(attributes.get(semconv.POLICY_VERSION)),
        prompt_tokens=_integer(
            attributes, semconv.INPUT_TOKENS, "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"
        ),
        completion_tokens=_integer(
            attributes,
            semconv.OUTPUT_TOKENS,
            "gen_ai.usage.completion_tokens",
            "llm.token_count.completion",
        ),
        request=_read_request(attributes),
        response=as_dict(unflatten(attributes, "gen_ai.response")),
        chat=read_chat(attributes),
    )


def find_dialect(span: SpanLike) -> Dialect | None:
    """Return who recorded a model call in this span, or None if it is not one."""
    attributes = span.attributes or {}
    kind, operation = attributes.get(OPENINFERENCE_KIND), attributes.get(semconv.OPERATION)
    if kind not in (None, "LLM") or operation not in (None, *MODEL_OPERATIONS):
        return None
    if any(
        name in attributes
        for name in (semconv.CALL_INDEX, semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS)
    ):
        return Dialect.AGL
    if span.name in (LITELLM_RAW_SPAN, LITELLM_SPAN):
        return Dialect.LITELLM
    if kind == "LLM":
        return Dialect.OPENINFERENCE
    if _has(attributes, f"{OPERATION_OUTPUT}.choices", f"{OPERATION_OUTPUT}.prompt_token_ids"):
        return Dialect.OPERATION
    if _has(attributes, FLAT_PROMPT, FLAT_COMPLETION) or PLAIN_RESPONSE_IDS in attributes:
        return Dialect.FLAT_GEN_AI
    if operation or _has(attributes, "gen_ai.request", "gen_ai.response"):
        return Dialect.GEN_AI
    return None


def read_response_id(attributes: Mapping[str, Any]) -> str | None:
    """Return the model server's id of the answer, or None."""
    names = [semconv.RESPONSE_ID, f"{OPERATION_OUTPUT}.id"]
    names += [f"{prefix}.id" for prefix in LITELLM_PREFIXES]
    for name in names:
        if response_id := _text(attributes.get(name)):
            return response_id
    return _text(_openinference_answer(attributes).get("id"))


def read_tokens(attributes: Mapping[str, Any]) -> Tokens:
    """Return token ids and log-probs, each from the first place that has them."""
    prompt_ids = response_ids = logprobs = None
    for answer in _answers(attributes):
        choice = as_dict(next(iter(as_list(answer.get("choices"))), None))
        extra = as_dict(choice.get("provider_specific_fields"))
        prompt_ids = (
            prompt_ids
            or _token_ids(answer.get("prompt_token_ids"))
            or _token_ids(choice.get("prompt_token_ids"))
        )
        response_ids = (
            response_ids
            or _token_ids(answer.get("response_token_ids"))
            or _token_ids(choice.get("token_ids"))
            or _token_ids(extra.get("token_ids"))
        )
        logprobs = (
            logprobs or _logprobs(answer.get("logprobs")) or _logprobs(choice.get("logprobs"))
        )
        if prompt_ids and response_ids and logprobs:
            break
    if response_ids is None or logprobs is None or len(logprobs) != len(response_ids):
        logprobs = None
    return Tokens(prompt_ids, response_ids, logprobs)


def _answers(attributes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what each dialect holds, in vLLM's form of a chat completion; costly ones last."""
    yield {
        "prompt_token_ids": attributes.get(semconv.PROMPT_TOKEN_IDS),
        "response_token_ids": attributes.get(semconv.RESPONSE_TOKEN_IDS),
        "logprobs": attributes.get(semconv.LOGPROBS),
    }
    yield {
        "prompt_token_ids": attributes.get(PLAIN_PROMPT_IDS),
        "response_token_ids": attributes.get(PLAIN_RESPONSE_IDS),
        "logprobs": attributes.get(PLAIN_LOGPROBS),
    }
    yield as_dict(unflatten(attributes, OPERATION_OUTPUT))
    for prefix in LITELLM_PREFIXES:
        names = ("prompt_token_ids", "response_token_ids", "choices")
        yield {name: parse_literal(attributes.get(f"{prefix}.{name}")) for name in names}
    yield _openinference_answer(attributes)


def _openinference_answer(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer that OpenInference keeps as JSON."""
    if attributes.get(OPENINFERENCE_KIND) != "LLM":
        return {}
    return as_dict(parse_json(attributes.get(OPENINFERENCE_OUTPUT_VALUE)))


def _token_ids(recorded: Any) -> list[int] | None:
    """Return a list of token ids, or the first list of several; None for anything else."""
    ids = as_list(parse_literal(recorded))
    if ids and isinstance(ids[0], list | tuple):
        ids = list(ids[0])
    return ids if ids and set(map(type, ids)) == {int} and min(ids) >= 0 else None


def _logprobs(recorded: Any) -> list[float] | None:
    """Return the log-prob at each position, from numbers or from OpenAI's `content`."""
    recorded = parse_literal(recorded)
    if isinstance(recorded, Mapping):
        recorded = recorded.get("content")
    values: list[Any] = []
    for entry in map(parse_json, as_list(parse_literal(recorded))):
        values.append(entry.get("logprob") if isinstance(entry, Mapping) else entry)
    if not values or not set(map(type, values)) <= {int, float}:
        return None
    logprobs = [to_float(value) for value in values]
    return logprobs if all(map(math.isfinite, logprobs)) else None


def _read_request(attributes: Mapping[str, Any]) -> dict[str, Any]:
    request = as_dict(unflatten(attributes, "gen_ai.request"))
    request.pop("functions", None)
    if model := attributes.get("llm.model_name"):
        parameters = as_dict(parse_json(attributes.get("llm.invocation_parameters")))
        request = {"model": model, **parameters, **request}
    return request


def _has(attributes: Mapping[str, Any], *prefixes: str) -> bool:
    dotted = tuple(f"{prefix}." for prefix in prefixes)
    return any(name in prefixes or name.startswith(dotted) for name in attributes)


def _integer(attributes: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of several attributes that is an integer."""
    return next((attributes[name] for name in names if type(attributes.get(name)) is int), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
