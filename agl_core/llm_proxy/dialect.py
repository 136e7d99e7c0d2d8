"""What a dialect is: how agents ask, and how they are answered.

Upstream, every dialect is one of the two that give token ids: chat completions, or completions. The
core (`handler`, `relay`) forwards, records and retries, and knows no dialect.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import orjson

from agl_core.llm_proxy import capture
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.events import StreamEvent, to_event
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.visible import visible_event


class StreamWriter(Protocol):
    """Makes the agent's stream of the model server's; each call returns bytes for the agent."""

    def chunk(self, event: StreamEvent, chunk: object) -> bytes:
        """Take an event with JSON."""
        ...

    def other(self, event: StreamEvent) -> bytes:
        """Take a comment, or an event that is no JSON."""
        ...

    def done(self, event: StreamEvent) -> bytes:
        """Take `[DONE]`."""
        ...

    def end(self, rest: bytes) -> bytes:
        """End the stream; `rest` came after the last event."""
        ...

    def failure(self, refusal: Refusal) -> bytes:
        """End the stream with an error."""
        ...


class Dialect(ABC):
    """One way for agents to call a model."""

    upstream_path = "/chat/completions"

    @abstractmethod
    def ask(self, body: JsonObject) -> JsonObject:
        """Return an agent's request as it is for the model server.

        Raises:
            Refusal: It is malformed, or asks for what is not supported.
        """

    def add_recording(self, asked: JsonObject, seed: int) -> JsonObject:
        """Return a request that asks for token ids and log-probs too."""
        return capture.add_recording(asked, seed)

    def request_attributes(self, asked: JsonObject) -> JsonObject:
        """Return the span attributes of a request as it goes to the model server."""
        return capture.request_attributes(asked)

    def as_chat(self, answer: JsonObject) -> JsonObject:
        """Return an answer of the model server, or a chunk of one, as chat completions have it."""
        return answer

    @abstractmethod
    def answer(self, answer: JsonObject, body: JsonObject) -> JsonObject:
        """Return what the agent gets of the model server's answer to its request `body`."""

    @abstractmethod
    def writer(self, body: JsonObject) -> StreamWriter:
        """Return what writes the agent's stream."""

    def error(self, refusal: Refusal) -> JsonObject:
        """Return an error in the dialect's shape."""
        return refusal.body()

    def upstream_error(self, status: int, content: bytes) -> bytes:
        """Return the model server's error as the agent gets it."""
        del status
        return content


class PassingWriter:
    """Passes events on, without what the agent did not ask for.

    Args:
        body: The agent's request.
    """

    def __init__(self, body: JsonObject) -> None:
        self._body = body

    def chunk(self, event: StreamEvent, chunk: object) -> bytes:
        """Return the event with less in it; as it came where all was asked for."""
        return visible_event(event, chunk, self._body)

    def other(self, event: StreamEvent) -> bytes:
        """Return the event as it came."""
        return event.raw

    def done(self, event: StreamEvent) -> bytes:
        """Return the event as it came."""
        return event.raw

    def end(self, rest: bytes) -> bytes:
        """Return what came after the last event."""
        return rest

    def failure(self, refusal: Refusal) -> bytes:
        """Return an error event, which OpenAI's clients raise."""
        return to_event(orjson.dumps(refusal.body()))
