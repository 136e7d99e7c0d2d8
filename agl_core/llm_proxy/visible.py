"""What an agent gets of an answer: everything but what its own request did not ask for. Pure
functions.
"""

from typing import Any

import orjson

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.events import StreamEvent

_IDS = ("token_ids", "prompt_token_ids")


def visible_answer(answer: JsonObject, body: JsonObject) -> JsonObject:
    """Return the answer without what the agent's own request `body` did not ask for."""
    visible = dict(answer)
    if not body.get("return_token_ids"):
        visible.pop("prompt_token_ids", None)
    visible["choices"] = [_visible_choice(choice, body) for choice in answer["choices"]]
    return visible


def visible_event(event: StreamEvent, chunk: Any, body: JsonObject) -> bytes:
    """Return an event without what the agent's own request `body` did not ask for.

    Args:
        event: The event.
        chunk: Its data, parsed.
        body: What the agent sent.
    """
    if not isinstance(chunk, dict):
        return event.raw
    visible = dict(chunk)
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    if not wants_usage and visible.pop("usage", None) and not visible.get("choices"):
        return b""
    if not body.get("return_token_ids"):
        visible.pop("prompt_token_ids", None)
    if isinstance(choices := chunk.get("choices"), list):
        visible["choices"] = [_visible_choice(choice, body) for choice in choices]
    return event.raw if visible == chunk else event.with_data(orjson.dumps(visible))


def _visible_choice(choice: Any, body: JsonObject) -> Any:
    if not isinstance(choice, dict):
        return choice
    visible = dict(choice)
    if not body.get("return_token_ids"):
        for name in _IDS:
            visible.pop(name, None)
    wanted = body.get("logprobs")  # of legacy completions a number, which may be 0
    if (wanted is None or wanted is False) and "logprobs" in visible:
        visible["logprobs"] = None
    return visible
