"""How the sampling parameters of a resource and those of an agent meet. Pure functions.

The rule: what the agent sends in a call holds for that call; what it leaves out, or sends as null,
is the resource's for the rollout's mode; what neither says is the model server's default. The two
names of the token limit count as one. What would make recorded log-probs wrong is refused.
"""

from collections.abc import Mapping
from typing import Any

from agl_core.errors import ConfigError
from agl_core.llm_proxy.capture import JsonObject
from agl_core.sampling import NEUTRAL

MAX_CHOICES = 128
_LIMITS = ("max_tokens", "max_completion_tokens")
_NOT_SAMPLING = frozenset(
    {"model", "messages", "prompt", "input", "stream", "stream_options", "tools", "tool_choice"}
)
_UNSUPPORTED = {
    "use_beam_search": "beam search samples nothing",
    "best_of": "it would keep choices by their log-probs; send n",
}


def check_sampling_parameters(parameters: Mapping[str, Any]) -> JsonObject:
    """Return a resource's sampling parameters as fields of a request; `extra_body`'s are among
    them.

    Raises:
        ConfigError: They hold something else, or what is not supported.
    """
    extra = parameters.get("extra_body") or {}
    if not isinstance(extra, dict):
        raise ConfigError("sampling parameters: extra_body is not a JSON object")
    fields = {**parameters, **extra}
    fields.pop("extra_body", None)
    if others := sorted(_NOT_SAMPLING & fields.keys()):
        raise ConfigError(f"sampling parameters cannot set {', '.join(others)}: agents do")
    if reason := find_unsupported(fields):
        raise ConfigError(f"sampling parameters: {reason}")
    return fields


def fill_in(body: JsonObject, defaults: Mapping[str, Any]) -> JsonObject:
    """Return an agent's request with the resource's parameters where it has none.

    Args:
        body: The request.
        defaults: The resource's, as fields of a request.
    """
    if not defaults:
        return body
    sent = {name for name, value in body.items() if value is not None}
    if not sent.isdisjoint(_LIMITS):
        sent.update(_LIMITS)
    return {**body, **{name: value for name, value in defaults.items() if name not in sent}}


def find_unsupported(body: JsonObject) -> str | None:
    """Return what the proxy cannot serve about the parameters of a request, or None."""
    for name, reason in _UNSUPPORTED.items():
        if body.get(name):
            return f"{name} is not supported: {reason}"
    # vLLM reads "0.7" as 0.7; recorded as a text it would count as not said.
    for name in (*NEUTRAL, *_LIMITS):
        value = body.get(name)
        if value is not None and type(value) not in (int, float):
            return f"{name}={value!r} is not a number"
    if not isinstance(body.get("stream_options") or {}, dict):
        return "stream_options is not a JSON object"
    n = body.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_CHOICES):
        return f"n={n!r} is not a number of choices from 1 to {MAX_CHOICES}"
    return None
