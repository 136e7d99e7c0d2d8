"""What a response of OpenAI's is made of. Pure but for the time that it is made at."""

import time
from typing import Any

from agl_core.llm_proxy.answer_shape import count_of
from agl_core.llm_proxy.capture import JsonObject

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_GIVEN_UP = ("abort", "error")
"""Finish reasons of a server that did not go on; OpenAI has no reason for them."""
_ECHOED: JsonObject = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that a response repeats, and what it says where the request does not."""


def response_head(answer_id: Any, body: JsonObject) -> JsonObject:
    """Return a response that has just begun.

    Args:
        answer_id: Of the model server's answer.
        body: The agent's request.
    """
    echoed = {
        name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()
    }
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.get("model"),
        "output": [],
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "usage": None,
        **echoed,
    }


def finished(head: JsonObject, output: list[JsonObject], reason: Any, usage: Any) -> JsonObject:
    """Return a response that has ended.

    Args:
        head: The response when it began.
        output: Its items.
        reason: `finish_reason` of the choice.
        usage: Of the chat completion, or None.
    """
    incomplete = _INCOMPLETE.get(reason)
    is_cut = incomplete is not None or reason in _GIVEN_UP
    prompt = count_of(usage, "prompt_tokens") or 0
    completion = count_of(usage, "completion_tokens") or 0
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = count_of(details, "cached_tokens") or 0
    return {
        **head,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "output": output,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def message_item(item_id: str, text: str, status: str = "completed") -> JsonObject:
    """Return the item of a message."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part] if status == "completed" else [],
    }


def call_item(call_id: Any, name: Any, arguments: str, status: str = "completed") -> JsonObject:
    """Return the item of a function call."""
    return {
        "id": f"fc_{call_id}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }
