"""Spans of one attempt to chats in OpenAI's form, as prompt optimisation and fine-tuning read them.

Every span that holds a prompt, a completion, or parameters of a request or an answer is one entry,
in the order of the calls' starts. Reading is strict: a chat that is not what OpenAI accepts is an
error here rather than at whoever uses it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from opentelemetry.sdk.trace import ReadableSpan

from agl_core import semconv
from agl_core.adapter.attributes import unflatten
from agl_core.adapter.base import TraceAdapter, as_spans
from agl_core.adapter.chat import (
    FLAT_COMPLETION,
    FLAT_PROMPT,
    OPENINFERENCE_INPUT,
    OPENINFERENCE_OUTPUT,
    Chat,
    ChatMessage,
    read_chat,
    to_tool_call,
)
from agl_core.adapter.llm_call import MODEL_OPERATIONS, OPENINFERENCE_KIND
from agl_core.types.tracer import Span

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_REQUEST, _RESPONSE = "gen_ai.request", "gen_ai.response"
_PREFIXES = (FLAT_PROMPT, FLAT_COMPLETION, _REQUEST, _RESPONSE)
_PREFIXES_OPENINFERENCE = (OPENINFERENCE_INPUT, OPENINFERENCE_OUTPUT)


class OpenAIMessages(TypedDict):
    """One chat: the prompt's messages with the answer after them."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None
    """Function tools that the model could call; None if none are recorded."""


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """Chats of an attempt's model calls, from any dialect that `adapter.chat` reads."""

    def adapt(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> list[OpenAIMessages]:
        """Return the chat of each model call.

        Calls of tools are those in the completion, else those of child spans with `tool.*`.

        Args:
            source: Spans of one attempt, in any order.

        Raises:
            ValueError: `gen_ai.prompt` is not a list, `gen_ai.request` or `gen_ai.response` is not
                a mapping, or a message is not one that OpenAI accepts.
        """
        spans = as_spans(source)
        tool_calls: dict[str, list[dict[str, Any]]] = {}
        for span in sorted(spans, key=_start):
            if span.parent_id and (call := _tool_call(span)):
                tool_calls.setdefault(span.parent_id, []).append(call)
        return [
            _chat_of(span, tool_calls.get(span.span_id, []))
            for span in sorted(filter(_holds_chat, spans), key=_start)
        ]


def _holds_chat(span: Span) -> bool:
    attributes = span.attributes
    if attributes.get(OPENINFERENCE_KIND) not in (None, "LLM"):
        return False
    if attributes.get(semconv.OPERATION) not in (None, *MODEL_OPERATIONS):
        return False
    dotted = tuple(f"{prefix}." for prefix in (*_PREFIXES, *_PREFIXES_OPENINFERENCE))
    current = (semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES)
    return any(name in current or name.startswith(dotted) for name in attributes)


def _start(span: Span) -> float:
    return span.start_time or 0.0


def _chat_of(span: Span, tool_calls: list[dict[str, Any]]) -> OpenAIMessages:
    _check_shape(span, FLAT_PROMPT, list)
    _check_shape(span, _REQUEST, dict)
    _check_shape(span, _RESPONSE, dict)
    chat = read_chat(span.attributes)
    messages = [_checked(message, span) for message in chat.prompt]
    messages += [_checked(message, span) for message in _answers(chat, tool_calls)]
    return OpenAIMessages(messages=messages, tools=chat.tools or None)


def _check_shape(span: Span, prefix: str, shape: type) -> None:
    recorded = unflatten(span.attributes, prefix)
    if recorded is not None and not isinstance(recorded, shape):
        raise ValueError(
            f"Extracted {prefix.removeprefix('gen_ai.')} from trace is not a {shape.__name__}: "
            f"span {span.span_id} ({span.name}): the names below {prefix} make a "
            f"{type(recorded).__name__}, not a {shape.__name__}"
        )


def _answers(chat: Chat, tool_calls: list[dict[str, Any]]) -> list[ChatMessage]:
    """Return what the assistant said, with the tools that child spans show if it names none."""
    answers: list[ChatMessage] = []
    for completion in chat.completions:
        if completion.get("role") in (None, "assistant"):
            answer = {**completion, "role": "assistant"}
            answer.pop("finish_reason", None)
            answers.append(answer)
    if tool_calls and answers and not any("tool_calls" in answer for answer in answers):
        answers[-1]["tool_calls"] = tool_calls
    for answer in answers:
        if answer.get("content") is None and "tool_calls" not in answer:
            answer["content"] = ""
    return answers


def _checked(message: ChatMessage, span: Span) -> ChatMessage:
    """Return a message that OpenAI accepts; content of a message that calls tools may be null."""
    role, content = message.get("role"), message.get("content")
    problem = None
    if role not in ROLES:
        problem = f"role {role!r} is none of {', '.join(ROLES)}"
    elif role == "tool" and not isinstance(message.get("tool_call_id"), str):
        problem = "an answer of a tool has no tool_call_id"
    elif content is None and (role != "assistant" or not message.get("tool_calls")):
        problem = f"a message of role {role} has no content"
    elif content is not None and not isinstance(content, str | list):
        problem = f"content is a {type(content).__name__}"
    if problem:
        raise ValueError(f"span {span.span_id} ({span.name}): {problem}")
    return {**message, "content": content}


def _tool_call(span: Span) -> dict[str, Any] | None:
    """Return the call of a tool that a span records, or None."""
    recorded = unflatten(span.attributes, "tool")
    if not isinstance(recorded, Mapping) or "name" not in recorded:
        return None
    call = recorded.get("call")
    call = call if isinstance(call, Mapping) else {}
    return to_tool_call(
        {
            "id": call.get("id"),
            "type": call.get("type"),
            "function": {"name": recorded["name"], "arguments": recorded.get("parameters")},
        }
    )
