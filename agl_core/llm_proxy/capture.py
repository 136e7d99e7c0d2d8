"""What the proxy adds to a request, records of a call, and keeps from the agent: pure functions.

The backend speaks chat completions in vLLM's dialect: asked for `return_token_ids` and `logprobs`,
it answers with `prompt_token_ids` at the top level, `token_ids` in each choice, and the sampled
log-prob of each token in `choices[].logprobs.content[].logprob`.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import orjson

from agl_core import semconv
from agl_core.llm_proxy.upstream import UpstreamReply, UpstreamStream
from agl_core.types.training import PolicyRef

JsonObject = dict[str, Any]

POLICY_VERSION_HEADER = "x-agl-policy-version"
WEIGHTS_DIGEST_HEADER = "x-agl-weights-digest"
_POLICY_HEADERS = (POLICY_VERSION_HEADER, WEIGHTS_DIGEST_HEADER)
NO_TOKEN_IDS = "no token ids in the answer"


def call_seed(rollout_seed: int | str, call_index: int) -> int:
    """Return the sampling seed of one call, in [0, 2**63); the same for every attempt."""
    digest = hashlib.sha256(f"{rollout_seed}/{call_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def find_unsupported(body: JsonObject) -> str | None:
    """Return what the proxy cannot serve about a request yet, or None."""
    if not isinstance(body.get("messages"), list):
        return "the request has no list of messages"
    if not isinstance(body.get("stream_options") or {}, dict):
        return "stream_options is not a JSON object"
    if body.get("n") not in (None, 1):
        return f"n={body['n']} is not supported yet; send one request for each choice"
    return None


def add_recording(body: JsonObject, seed: int) -> JsonObject:
    """Return the request with token ids and log-probs asked for, and a seed if it has none.

    A stream is asked for its usage too.
    """
    asked = {**body, "logprobs": True, "return_token_ids": True}
    options = body.get("stream_options") or {}
    if body.get("stream") and isinstance(options, dict):
        asked["stream_options"] = {**options, "include_usage": True}
    if asked.get("seed") is None:
        asked["seed"] = seed
    return asked


def request_attributes(body: JsonObject) -> dict[str, Any]:
    """Return the span attributes of a request as it goes to the backend."""
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    return _without_none(
        {
            semconv.OPERATION: "chat",
            semconv.PROVIDER: "openai",
            semconv.REQUEST_MODEL: body.get("model"),
            semconv.REQUEST_TEMPERATURE: body.get("temperature"),
            semconv.REQUEST_TOP_P: body.get("top_p"),
            semconv.REQUEST_MAX_TOKENS: max_tokens,
            semconv.REQUEST_SEED: body.get("seed"),
            semconv.INPUT_MESSAGES: orjson.dumps(body.get("messages")).decode(),
        }
    )


def response_attributes(answer: JsonObject, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the span attributes of an answer with one choice."""
    choice = _only_choice(answer)
    usage = answer.get("usage") or {}
    return _without_none(
        {
            semconv.RESPONSE_ID: answer.get("id"),
            semconv.RESPONSE_MODEL: answer.get("model"),
            semconv.FINISH_REASONS: [str(choice.get("finish_reason"))],
            semconv.INPUT_TOKENS: usage.get("prompt_tokens"),
            semconv.OUTPUT_TOKENS: usage.get("completion_tokens"),
            semconv.OUTPUT_MESSAGES: orjson.dumps([choice.get("message")]).decode(),
            semconv.PROMPT_TOKEN_IDS: _token_ids(answer.get("prompt_token_ids")),
            semconv.RESPONSE_TOKEN_IDS: _token_ids(choice.get("token_ids")),
            semconv.LOGPROBS: _logprobs(choice),
            semconv.POLICY_VERSION: headers.get(POLICY_VERSION_HEADER),
            semconv.WEIGHTS_DIGEST: headers.get(WEIGHTS_DIGEST_HEADER),
        }
    )


def find_other_policy(
    policy: PolicyRef, body: JsonObject, reply: UpstreamReply | UpstreamStream
) -> str | None:
    """Return why an answer does not come from the policy that it should, or None.

    The model server may have been given other weights meanwhile, by another run that shares it.
    """
    served = {name: reply.headers.get(name) for name in _POLICY_HEADERS}
    expected = dict(zip(_POLICY_HEADERS, (policy.version, policy.weights_digest), strict=True))
    is_gone = reply.status == 404 and body.get("model") == policy.version
    if not is_gone and (reply.status != 200 or served == expected):
        return None
    found = "not that" if is_gone else " with weights ".join(map(str, served.values()))
    return (
        f"this rollout is for {policy.version} with weights {policy.weights_digest}, the model "
        f"server serves {found}: does another run use the server?"
    )


def find_defect(attributes: Mapping[str, Any]) -> str | None:
    """Return why a recorded call cannot be trained on, or None.

    Args:
        attributes: Those of `response_attributes`. The invariant: one finite log-prob for each
            response token id.
    """
    prompt_ids = attributes.get(semconv.PROMPT_TOKEN_IDS)
    response_ids = attributes.get(semconv.RESPONSE_TOKEN_IDS)
    logprobs = attributes.get(semconv.LOGPROBS)
    if not prompt_ids or not response_ids:
        return NO_TOKEN_IDS
    if logprobs is None:
        return "no log-probs in the answer"
    if len(logprobs) != len(response_ids):
        return f"{len(response_ids)} response token ids but {len(logprobs)} log-probs"
    if not all(map(math.isfinite, logprobs)):
        return "a log-prob is not finite"
    return None


def visible_answer(answer: JsonObject, body: JsonObject) -> JsonObject:
    """Return the answer without what the agent's own request `body` did not ask for."""
    keeps_ids, keeps_logprobs = bool(body.get("return_token_ids")), bool(body.get("logprobs"))
    visible = dict(answer)
    if not keeps_ids:
        visible.pop("prompt_token_ids", None)
    visible["choices"] = [
        _visible_choice(choice, keeps_ids, keeps_logprobs) for choice in answer["choices"]
    ]
    return visible


def _visible_choice(choice: JsonObject, keeps_ids: bool, keeps_logprobs: bool) -> JsonObject:
    visible = dict(choice)
    if not keeps_ids:
        visible.pop("token_ids", None)
    if not keeps_logprobs:
        visible["logprobs"] = None
    return visible


def check_answer(answer: Any) -> str | None:
    """Return why a backend's answer is not a chat completion with one choice, or None."""
    if not isinstance(answer, dict):
        return "the answer is not a JSON object"
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return "the answer does not have exactly one choice"
    return None


def _only_choice(answer: JsonObject) -> JsonObject:
    return answer["choices"][0]


def _token_ids(ids: Any) -> list[int] | None:
    """Return the ids, or None for anything but a list of integers."""
    if isinstance(ids, list) and all(type(token_id) is int for token_id in ids):
        return ids
    return None


def _logprobs(choice: JsonObject) -> list[float] | None:
    """Return the sampled token's log-prob at each position, or None where some is missing."""
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list):
        return None
    try:
        return [float(token["logprob"]) for token in content]
    except (KeyError, TypeError, ValueError):
        return None


def _without_none(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
