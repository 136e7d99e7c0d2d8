"""Whether what a model server sends has the shape of a completion. Pure functions.

Checked is what is read or recorded here, and what agents' clients read without looking; what else
an answer holds passes.
"""

from typing import Any

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""What code that reads an answer raises where it is none, nested too deep for instance."""
_MAX_COUNT = 2**31 - 1


def check_answer(answer: Any, num_choices: int = 1) -> str | None:
    """Return why an answer is not a completion with so many choices, or None."""
    if not isinstance(answer, dict):
        return "the answer is not a JSON object"
    choices = answer.get("choices")
    if choices is None and answer.get("error"):
        return f"the answer is an error: {answer['error']}"
    found = choices if isinstance(choices, list) else []
    if len(found) != num_choices or not all(isinstance(choice, dict) for choice in found):
        wanted = "exactly one choice" if num_choices == 1 else f"{num_choices} choices"
        return f"the answer does not have {wanted}"
    if not isinstance(answer.get("usage") or {}, dict):
        return "the answer's usage is not a JSON object"
    return next(filter(None, map(_check_choice, found)), None)


def _check_choice(choice: dict[str, Any]) -> str | None:
    """Return why a choice is none, or None."""
    if not isinstance(choice.get("finish_reason"), str | None):
        return f"finish_reason is {_brief(choice['finish_reason'])}, not a text"
    if "message" in choice:
        return check_message(choice["message"])
    if not isinstance(choice.get("text"), str):
        return "a choice has neither a message nor a text"
    return None


def check_message(message: Any) -> str | None:
    """Return why a message, or the delta of one, is none, or None."""
    if not isinstance(message, dict):
        return f"a message is {_brief(message)}, not a JSON object"
    if not isinstance(message.get("content"), str | None):
        return f"the content of a message is {_brief(message['content'])}, not a text"
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        return f"tool_calls is {_brief(calls)}, not a list"
    return next(filter(None, map(_check_call, calls or ())), None)


def _check_call(call: Any) -> str | None:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict | None):
        return f"a tool call is {_brief(call)}"
    function = call.get("function") or {}
    texts = (call.get("id"), function.get("name"), function.get("arguments"))
    if not all(isinstance(text, str | None) for text in texts):
        return f"id, name or arguments of a tool call are no texts: {_brief(call)}"
    return None


def count_of(usage: Any, name: str) -> int | None:
    """Return a count of tokens; None where it is no number that counts something."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


def _brief(value: Any) -> str:
    """Return a value in few characters."""
    text = "an object" if isinstance(value, dict) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
