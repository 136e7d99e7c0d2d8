"""Whose call it is, and of which kind: by path or by headers.

    [/mode/{mode}][/rollout/{rollout_id}/attempt/{attempt_id}][/v1]/{kind}
    x-rollout-id, x-attempt-id, x-rollout-mode

The path wins. `/v1` may be missing or twice: clients differ in whether they add it themselves.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agl_core.llm_proxy.refusal import Refusal

_PATH = re.compile(
    r"(?:/mode/(?P<mode>[^/]+))?"
    r"(?:/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?"
    r"(?:/v1){0,2}/(?P<kind>[a-z_]+(?:/[a-z_]+)?)"
)
_MODES = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class Attribution:
    """What a request's path and headers say."""

    rollout_id: str
    attempt_id: str
    mode: str | None


def find_kind(path: str) -> str | None:
    """Return what a path asks for, such as `chat/completions`; None for no path of a call."""
    found = _PATH.fullmatch(path)
    return found and found["kind"]


def find_attribution(path: str, headers: Mapping[str, str]) -> Attribution:
    """Return whose call it is.

    Args:
        path: One that has a kind.
        headers: Of the request, by names in lower case.

    Raises:
        Refusal: Neither path nor headers say it, or the mode is none.
    """
    found = _PATH.fullmatch(path)
    assert found, "the path was found to be one of a call"
    rollout_id = found["rollout"] or headers.get("x-rollout-id")
    attempt_id = found["attempt"] or headers.get("x-attempt-id")
    mode = found["mode"] or headers.get("x-rollout-mode")
    if mode is not None and mode not in _MODES:
        raise Refusal(400, f"mode {mode!r} is none of {', '.join(_MODES)}", "unknown_mode")
    if not rollout_id or not attempt_id:
        raise Refusal(
            404,
            "this call belongs to no attempt: the base URL of a client is "
            "/rollout/{rollout_id}/attempt/{attempt_id}/v1, or send the headers x-rollout-id and "
            "x-attempt-id",
            "no_attempt",
        )
    return Attribution(rollout_id, attempt_id, mode)
