"""The distribution that a model call is sampled from, by the fields of its request.

An update compares log-probs of the policy's own distribution, `softmax(logits / temperature)`. Any
field that cuts, penalises, biases or constrains it, or decides when a response ends, makes a call
incomparable, and a field that a request leaves out may have another default on the server (vLLM
reads them from the model's `generation_config.json`). So every request states these fields, and
what differs from the policy's own distribution is recorded with the call.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

JsonObject = dict[str, Any]

TEMPERATURE = "temperature"
NEUTRAL: Mapping[str, float] = {
    TEMPERATURE: 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields that a server may have defaults for, with the values that leave the distribution as it
is."""
_CONSTRAINTS = (
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "logit_bias",
    "logits_processors",
    "min_tokens",
    "parallel_tool_calls",
    "repetition_detection",
    "response_format",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "tool_choice",
    "vllm_xargs",
    "watermarking",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
)
"""Other fields of OpenAI and vLLM that change which tokens can follow, or where a response ends."""
CHANGING = ("tools", *(name for name in NEUTRAL if name != TEMPERATURE), *_CONSTRAINTS)
"""Fields that change the distribution; the temperature is compared by itself."""
ENDINGS = ("ignore_eos", "stop", "stop_token_ids")
"""Those of `CHANGING` that only decide where a response ends: the log-probs of its tokens are the
policy's own."""
_WITHOUT_EFFECT = frozenset(
    {
        # what is asked, and the prompt's ids, which are recorded
        *("model", "messages", "prompt", "tools", "documents", "reasoning_effort", "verbosity"),
        *("chat_template", "chat_template_kwargs", "add_generation_prompt", "add_special_tokens"),
        *("continue_final_message", "truncate_prompt_tokens", "truncation_side", "suffix"),
        *("mm_processor_kwargs", "media_io_kwargs", "modalities"),
        # how many responses, of what length, by which draws
        *("n", "seed", "max_tokens", "max_completion_tokens", "forced_token_ids"),
        # what the answer shows
        *("stream", "stream_options", "stream_interval", "logprobs", "top_logprobs", "echo"),
        *("prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_token_offsets"),
        *("return_tokens_as_token_ids", "return_prompt_text", "include_reasoning"),
        *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        *("length_penalty", "use_beam_search", "best_of"),  # of beam search, which is refused
        # book-keeping
        *("user", "metadata", "store", "service_tier", "safety_identifier", "priority"),
        *("request_id", "session_id", "cache_salt", "prompt_cache_key", "prompt_cache_retention"),
    }
)
_ALSO_NEUTRAL: Mapping[str, Collection[Any]] = {
    "top_k": (0,),
    "parallel_tool_calls": (True, False),  # without tools it says nothing
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
_EMPTY: tuple[Any, ...] = ("", [], {})
"""Values that say nothing. 0 and false do: a thinking budget of 0 ends the thinking."""


def state_fields(body: JsonObject) -> JsonObject:
    """Return a request that leaves no field of `NEUTRAL` to the server's defaults."""
    sent = {name for name, value in body.items() if value is not None}
    return body | {name: value for name, value in NEUTRAL.items() if name not in sent}


def deviations(body: Mapping[str, Any]) -> JsonObject:
    """Return the fields by which a request is sampled from another distribution than the policy's
    at its temperature.

    A field that is not known counts as one of them. So do `parallel_tool_calls: false` beside tools
    and a tool that is `strict`: vLLM binds such answers to a grammar.
    """
    found = {
        name: value
        for name, value in body.items()
        if name not in _WITHOUT_EFFECT and name != TEMPERATURE and not _is_neutral(name, value)
    }
    if body.get("tools") and body.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = False
    if strict := _strict_tools(body.get("tools")):
        found["tools"] = strict
    return found


def without_strict_tools(body: JsonObject) -> JsonObject:
    """Return a request whose tools are not `strict`, so that the policy samples freely.

    A policy that cannot make a wrong call does not learn to make right ones, and a grammar's
    log-probs are not its own.
    """
    tools = body.get("tools")
    if not _strict_tools(tools):
        return body
    assert isinstance(tools, list)
    return {**body, "tools": [_without_strict(tool) for tool in tools]}


def _without_strict(tool: Any) -> Any:
    if not _is_strict(tool):
        return tool
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _strict_tools(tools: Any) -> list[str]:
    """Return the names of the tools that ask for a grammar."""
    found = tools if isinstance(tools, list) else []
    return [str(tool["function"].get("name")) for tool in found if _is_strict(tool)]


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def _is_neutral(name: str, value: Any) -> bool:
    if value is None or value in _ALSO_NEUTRAL.get(name, ()):
        return True
    return value == NEUTRAL[name] if name in NEUTRAL else value in _EMPTY


def to_text(fields: Mapping[str, Any]) -> str:
    """Return deviations as they are recorded: JSON with sorted keys."""
    return json.dumps(fields, sort_keys=True, default=str)


def is_sampled_by(
    recorded: str | None, expected: Mapping[str, Any], allowed: Collection[str]
) -> bool:
    """Say whether a call was sampled as expected.

    Args:
        recorded: Its deviations by `to_text`; None where nobody recorded them.
        expected: The deviations that the run asks for.
        allowed: Fields that may have any value.
    """
    if recorded is None:
        return True
    found = json.loads(recorded)
    return all(
        name in allowed or found.get(name) == expected.get(name)
        for name in found.keys() | expected.keys()
    )
