"""Messages and token ids of a call under the names that Agent Lightning 0.3's adapters read.

    gen_ai.prompt.0.role            user
    gen_ai.prompt.0.content         text; JSON where it is a list of parts
    gen_ai.completion.0.tool_calls.0.{id,name,arguments}
    prompt_token_ids                [1, 2]

They repeat what other attributes say, so they are there only where `AGL_FLAT_MESSAGES` asks for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agl_core.env_var import LightningEnvVar, resolve_bool_env_var

_PROMPT = "gen_ai.prompt"
_COMPLETION = "gen_ai.completion"


def flat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a request's messages; none where they are not asked for."""
    if not _are_wanted():
        return {}
    return _flat(_PROMPT, _mappings(body.get("messages")))


def flat_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an answer's messages and token ids; none where not asked for."""
    if not _are_wanted():
        return {}
    choices = _mappings(answer.get("choices"))
    messages = [choice.get("message") or {} for choice in choices]
    flat = _flat(_COMPLETION, _mappings(messages))
    for number, choice in enumerate(choices):
        if isinstance(choice.get("finish_reason"), str):
            flat[f"{_COMPLETION}.{number}.finish_reason"] = choice["finish_reason"]
    response_ids = choices[0].get("token_ids") if choices else None
    for name, ids in (
        ("prompt_token_ids", answer.get("prompt_token_ids")),
        ("response_token_ids", response_ids),
    ):
        if isinstance(ids, list) and ids and all(type(one) is int for one in ids):
            flat[name] = ids
    return flat


def _are_wanted() -> bool:
    return bool(resolve_bool_env_var(LightningEnvVar.AGL_FLAT_MESSAGES, fallback=False))


def _flat(prefix: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for number, message in enumerate(messages):
        for name in ("role", "content", "name", "tool_call_id", "refusal"):
            if message.get(name) is not None:
                flat[f"{prefix}.{number}.{name}"] = _text(message[name])
        for index, call in enumerate(_mappings(message.get("tool_calls"))):
            function = call.get("function")
            parts = {"id": call.get("id"), **(function if isinstance(function, dict) else {})}
            for name in ("id", "name", "arguments"):
                if parts.get(name) is not None:
                    flat[f"{prefix}.{number}.tool_calls.{index}.{name}"] = _text(parts[name])
    return flat


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [v if isinstance(v, dict) else {} for v in values] if isinstance(values, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
