"""Names of spans and attributes, as constants.

The `agentlightning.*` names are those of Agent Lightning 0.3; `gen_ai.*` are the current ones of
OpenTelemetry (its generative AI conventions, status "development"). OpenTelemetry has no name for
token ids, log-probs or policy versions, so those are ours, under `agentlightning.llm.*`.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

# Span names.
ANNOTATION_SPAN = "agentlightning.annotation"
MESSAGE_SPAN = "agentlightning.message"
OBJECT_SPAN = "agentlightning.object"
EXCEPTION_SPAN = "agentlightning.exception"
OPERATION_SPAN = "agentlightning.operation"
REWARD_SPAN = "agentlightning.reward"
"""Read only: rewards are emitted as annotations."""
VIRTUAL_SPAN = "agentlightning.virtual"
ROLLOUT_SPAN = "agentlightning.rollout"
LLM_CALL_SPAN = "openai.chat.completion"
"""Name of the span of one model call; matches the reference's default `llm_call_match`."""

# Of the resource that produced a span.
TRACER_NAME = "agentlightning.tracer.name"

# Identity, on every span.
ROLLOUT_ID = "agentlightning.rollout_id"
ATTEMPT_ID = "agentlightning.attempt_id"
SEQUENCE_ID = "agentlightning.span_sequence_id"

# Where an attempt ran, on its root span.
HOST_NAME = "host.name"
PROCESS_ID = "process.pid"
EXECUTABLE = "process.executable.path"
"""The Python interpreter."""

# Rewards: `agentlightning.reward.<i>.name|value`, index 0 is the primary one.
REWARD_PREFIX = "agentlightning.reward"
PRIMARY_REWARD_NAME = "agentlightning.reward.0.name"
PRIMARY_REWARD_VALUE = "agentlightning.reward.0.value"
EVALUATION_SCORE = "gen_ai.evaluation.score.value"
"""OpenTelemetry's place for the score of an evaluation."""

# What else an agent may record.
LINK_PREFIX = "agentlightning.link"
"""`agentlightning.link.<i>.key_match|value_match`: an attribute of the span that is meant."""
TAG_PREFIX = "agentlightning.tag"
"""`agentlightning.tag.<i>`."""
MESSAGE_BODY = "agentlightning.message.body"
OBJECT_TYPE = "agentlightning.object.type"
OBJECT_LITERAL = "agentlightning.object.literal"
OBJECT_JSON = "agentlightning.object.json"
OPERATION_NAME = "agentlightning.operation.name"
OPERATION_INPUT = "agentlightning.operation.input"
OPERATION_OUTPUT = "agentlightning.operation.output"

# Exceptions, as OpenTelemetry names them.
EXCEPTION_TYPE = "exception.type"
EXCEPTION_MESSAGE = "exception.message"
EXCEPTION_STACKTRACE = "exception.stacktrace"
EXCEPTION_ESCAPED = "exception.escaped"

# One model call.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
PROMPT_TOKEN_IDS = "agentlightning.llm.prompt_token_ids"
RESPONSE_TOKEN_IDS = "agentlightning.llm.response_token_ids"
LOGPROBS = "agentlightning.llm.logprobs"
"""Sampled log-probs in nats, at the sampling temperature, one for each response token id."""
SAMPLING = "agentlightning.llm.sampling"
"""JSON of the request's fields by which the call was sampled from another distribution than the
policy's at its temperature (`agl_core.sampling`); `{}` where none was."""
POLICY_VERSION = "agentlightning.llm.policy_version"
WEIGHTS_DIGEST = "agentlightning.llm.weights_digest"
LLM_PREFIX = "agentlightning.llm."
CHOICE_PREFIX = "agentlightning.llm.choice"
"""`agentlightning.llm.choice.<i>.response_token_ids|logprobs`: of further choices than the first
one, from 1; the plain names are the first one's."""
CALL_INDEX = "agentlightning.llm.call_index"
"""0-based number of the call within its attempt."""
HTTP_STATUS = "http.response.status_code"

# Written by AgentOps, read as rewards. What adapters read of others is in `agl_core.adapter`.
AGENTOPS_TASK_OUTPUT = "agentops.task.output"
AGENTOPS_ENTITY_OUTPUT = "agentops.entity.output"


# The names that Agent Lightning 0.3 gives these, for agents that import them.
AGL_ANNOTATION = ANNOTATION_SPAN
AGL_MESSAGE = MESSAGE_SPAN
AGL_OBJECT = OBJECT_SPAN
AGL_EXCEPTION = EXCEPTION_SPAN
AGL_OPERATION = OPERATION_SPAN
AGL_REWARD = REWARD_SPAN
AGL_VIRTUAL = VIRTUAL_SPAN


class LightningResourceAttributes(StrEnum):
    """Of the resource that produced a span."""

    ROLLOUT_ID = ROLLOUT_ID
    ATTEMPT_ID = ATTEMPT_ID
    SPAN_SEQUENCE_ID = SEQUENCE_ID
    TRACER_NAME = TRACER_NAME


class LightningSpanAttributes(StrEnum):
    """Of spans; the first three are prefixes."""

    REWARD = REWARD_PREFIX
    LINK = LINK_PREFIX
    TAG = TAG_PREFIX
    MESSAGE_BODY = MESSAGE_BODY
    OBJECT_TYPE = OBJECT_TYPE
    OBJECT_LITERAL = OBJECT_LITERAL
    OBJECT_JSON = OBJECT_JSON
    OPERATION_NAME = OPERATION_NAME
    OPERATION_INPUT = OPERATION_INPUT
    OPERATION_OUTPUT = OPERATION_OUTPUT


class RewardAttributes(StrEnum):
    """Below `agentlightning.reward.<i>`."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class LinkAttributes(StrEnum):
    """Below `agentlightning.link.<i>`."""

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


class RewardPydanticModel(BaseModel):
    """One dimension of a reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: float


class LinkPydanticModel(BaseModel):
    """Names a span by one of its attributes, or by `trace_id` or `span_id`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key_match: str
    value_match: str
