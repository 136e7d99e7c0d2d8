"""What the proxy adds to a request and records of a call: pure functions.

The backend speaks chat completions in vLLM's dialect: asked for `return_token_ids` and `logprobs`,
it answers with `prompt_token_ids` at the top level, `token_ids` in each choice, and the sampled
log-prob of each token in `choices[].logprobs.content[].logprob`.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from agl_core import sampling, semconv
from agl_core.llm_proxy.answer_shape import count_of
from agl_core.llm_proxy.flat_messages import flat_answer, flat_request
from agl_core.token_check import find_impossible_id, find_impossible_logprob
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


def add_recording(body: JsonObject, seed: int) -> JsonObject:
    """Return a chat request with token ids and log-probs asked for, and a seed if it has none.

    A stream is asked for its usage too.
    """
    return {**body, "logprobs": True, "return_token_ids": True, **added_fields(body, seed)}


def added_fields(body: JsonObject, seed: int) -> JsonObject:
    """Return what every kind of request is given: a seed if it has none, usage of a stream."""
    added: JsonObject = {}
    if body.get("stream"):
        added["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    if body.get("seed") is None:
        added["seed"] = seed
    return added


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
            semconv.SAMPLING: sampling.to_text(sampling.deviations(body)),
            semconv.INPUT_MESSAGES: orjson.dumps(body.get("messages")).decode(),
            **flat_request(body),
        }
    )


def choice_attribute(name: str, index: int) -> str:
    """Return the name of a choice's attribute; that of the first one is the plain name."""
    if index == 0:
        return name
    return f"{semconv.CHOICE_PREFIX}.{index}.{name.removeprefix(semconv.LLM_PREFIX)}"


def response_attributes(answer: JsonObject, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the span attributes of an answer.

    Token ids and log-probs of further choices than the first one have names of their own
    (`choice_attribute`).
    """
    choices = answer["choices"]
    usage = answer.get("usage") or {}
    messages = [choice.get("message") for choice in choices]
    attributes = {
        semconv.RESPONSE_ID: _text(answer.get("id")),
        semconv.RESPONSE_MODEL: _text(answer.get("model")),
        semconv.FINISH_REASONS: [str(choice.get("finish_reason")) for choice in choices],
        semconv.INPUT_TOKENS: count_of(usage, "prompt_tokens"),
        semconv.OUTPUT_TOKENS: count_of(usage, "completion_tokens"),
        semconv.OUTPUT_MESSAGES: orjson.dumps(messages).decode(),
        **flat_answer(answer),
        semconv.PROMPT_TOKEN_IDS: _token_ids(answer.get("prompt_token_ids")),
        semconv.POLICY_VERSION: _header(headers, POLICY_VERSION_HEADER),
        semconv.WEIGHTS_DIGEST: _header(headers, WEIGHTS_DIGEST_HEADER),
    }
    for index, choice in enumerate(choices):
        ids_name = choice_attribute(semconv.RESPONSE_TOKEN_IDS, index)
        attributes[ids_name] = _token_ids(choice.get("token_ids"))
        attributes[choice_attribute(semconv.LOGPROBS, index)] = _logprobs(choice)
    return _without_none(attributes)


def find_other_policy(
    policy: PolicyRef, model: Any, status: int, headers: Mapping[str, str]
) -> str | None:
    """Return why an answer does not come from the policy that it should, or None.

    The model server may have been given other weights meanwhile, by another run that shares it.

    Args:
        policy: What must answer.
        model: The name that was asked for.
        status: Of the answer.
        headers: Of the answer.
    """
    served = {name: _header(headers, name) for name in _POLICY_HEADERS}
    expected = dict(zip(_POLICY_HEADERS, (policy.version, policy.weights_digest), strict=True))
    is_gone = status == 404 and model == policy.version
    if not is_gone and (status != 200 or served == expected):
        return None
    found = "not that" if is_gone else " with weights ".join(map(str, served.values()))
    return (
        f"this rollout is for {policy.version} with weights {policy.weights_digest}, the model "
        f"server serves {found}: does another run use the server?"
    )


def find_defect(attributes: Mapping[str, Any]) -> str | None:
    """Return why a recorded call cannot be trained on, or None.

    Args:
        attributes: Those of `response_attributes`. The invariant, for each choice: one possible
            log-prob for each response token id, and ids that can be tokens.
    """
    if not attributes.get(semconv.PROMPT_TOKEN_IDS):
        return NO_TOKEN_IDS
    if reason := find_impossible_id(attributes[semconv.PROMPT_TOKEN_IDS]):
        return f"prompt token ids: {reason}"
    num_choices = len(attributes.get(semconv.FINISH_REASONS, ("",)))
    for index in range(num_choices):
        response_ids = attributes.get(choice_attribute(semconv.RESPONSE_TOKEN_IDS, index))
        logprobs = attributes.get(choice_attribute(semconv.LOGPROBS, index))
        if defect := _find_choice_defect(response_ids, logprobs):
            return defect if index == 0 else f"choice {index}: {defect}"
    return None


def _find_choice_defect(response_ids: list[int] | None, logprobs: list[float] | None) -> str | None:
    if not response_ids:
        return NO_TOKEN_IDS
    if logprobs is None:
        return "no log-probs in the answer"
    if len(logprobs) != len(response_ids):
        return f"{len(response_ids)} response token ids but {len(logprobs)} log-probs"
    if reason := find_impossible_id(response_ids):
        return f"response token ids: {reason}"
    return find_impossible_logprob(logprobs)


def _token_ids(ids: Any) -> list[int] | None:
    """Return the ids, or None for anything but a list of integers."""
    if isinstance(ids, list) and set(map(type, ids)) <= {int}:
        return ids
    return None


def _logprobs(choice: JsonObject) -> list[float] | None:
    """Return the sampled token's log-prob at each position, or None where some is missing."""
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list):
        return None
    try:
        return [float(token["logprob"]) for token in content]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _header(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header as text that can be written; its bytes may be no Unicode."""
    value = headers.get(name)
    return None if value is None else value.encode(errors="replace").decode()


def _without_none(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
