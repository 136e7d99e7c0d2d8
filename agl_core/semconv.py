"""Names of spans and attributes, as constants.

The `agentlightning.*` names are those of Agent Lightning 0.3; `gen_ai.*` are the current ones of
OpenTelemetry (its generative AI conventions, status "development"). OpenTelemetry has no name for
token ids, log-probs or policy versions, so those are ours, under `agentlightning.llm.*`.
"""

# Span names.
ANNOTATION_SPAN = "agentlightning.annotation"
ROLLOUT_SPAN = "agentlightning.rollout"
LLM_CALL_SPAN = "openai.chat.completion"
"""Name of the span of one model call; matches the reference's default `llm_call_match`."""

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
POLICY_VERSION = "agentlightning.llm.policy_version"
WEIGHTS_DIGEST = "agentlightning.llm.weights_digest"
CALL_INDEX = "agentlightning.llm.call_index"
"""0-based number of the call within its attempt."""
HTTP_STATUS = "http.response.status_code"
