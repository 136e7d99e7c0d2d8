"""Content of messages that the policy can be trained on: text.

Policies are language models over text. A vision model would see an image that the update, which has
the token ids alone, does not see.
"""

from typing import Any

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.refusal import Refusal

_TEXT_PARTS = ("text", "refusal")
_BESIDE_TEXT = ("prompt_embeds", "mm_payload", "audio")
"""Fields of a request or a message that bring other content."""
_BESIDE_PART = ("image", "audio", "video", "file", "embeds")
"""In the names of fields of a part. vLLM reads a part without a type by its fields."""


def not_text(kind: Any) -> Refusal:
    """Return the refusal of content of some type."""
    message = (
        f"the request has content of the type {kind!r}: policies are trained on text alone, and "
        "the update would not see what the model saw; send text"
    )
    return Refusal(400, message, "unsupported")


def check_is_text(request: JsonObject) -> None:
    """Return if a request for the model server has text alone.

    Args:
        request: A chat completion or a completion.

    Raises:
        Refusal: It has images, audio, embeddings or other content.
    """
    messages = request.get("messages")
    for part in (request, *(messages if isinstance(messages, list) else ())):
        if isinstance(part, dict):
            _check_fields(part)
            _check_parts(part.get("content"))


def _check_fields(holder: JsonObject) -> None:
    for name in _BESIDE_TEXT:
        if holder.get(name):
            raise not_text(name)


def _check_parts(content: Any) -> None:
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if (kind := part.get("type", "text")) not in _TEXT_PARTS:
            raise not_text(kind)
        for name, value in part.items():
            if value is not None and any(word in name for word in _BESIDE_PART):
                raise not_text(name)
