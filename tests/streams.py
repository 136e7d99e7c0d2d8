"""Answers of chat completions as streams, in vLLM's dialect."""

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


def to_event(data: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def to_chunks(answer: dict[str, Any], *, with_usage: bool = True) -> list[dict[str, Any]]:
    """Return the chunks that an answer with one choice is streamed in, one for each token."""
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls")
    first_delta = {"role": "assistant", "content": None if calls else ""}
    first = {**head, "choices": [_choice(first_delta)]}
    if "prompt_token_ids" in answer:
        first["prompt_token_ids"] = answer["prompt_token_ids"]
    chunks = [first]
    text = calls[0]["function"]["arguments"] if calls else message["content"]
    num_tokens = answer["usage"]["completion_tokens"]
    bounds = [len(text) * number // num_tokens for number in range(num_tokens + 1)]
    for number in range(num_tokens):
        piece = text[bounds[number] : bounds[number + 1]]
        delta = _call_delta(calls[0], piece, number) if calls else {"content": piece}
        streamed = _choice(delta)
        if choice["logprobs"]:
            entries = choice["logprobs"]["content"][number : number + 1]
            streamed["logprobs"] = {"content": entries}
        if "token_ids" in choice:
            streamed["token_ids"] = choice["token_ids"][number : number + 1]
        if number == num_tokens - 1:
            streamed["finish_reason"] = choice["finish_reason"]
        chunks.append({**head, "choices": [streamed]})
    if with_usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return chunks


def to_events(answer: dict[str, Any], *, with_usage: bool = True) -> list[bytes]:
    """Return the events of the stream, the last one `[DONE]`."""
    return [*map(to_event, to_chunks(answer, with_usage=with_usage)), DONE]


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _call_delta(call: dict[str, Any], piece: str, number: int) -> dict[str, Any]:
    if number == 0:
        function = {"name": call["function"]["name"], "arguments": piece}
        entry = {"index": 0, "id": call["id"], "type": "function", "function": function}
    else:
        entry = {"index": 0, "function": {"arguments": piece}}
    return {"tool_calls": [entry]}
