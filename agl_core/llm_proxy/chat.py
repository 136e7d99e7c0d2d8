"""OpenAI's chat completions: passed on as they are."""

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.dialect import Dialect, PassingWriter, StreamWriter
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.visible import visible_answer


class ChatDialect(Dialect):
    """`POST /v1/chat/completions`."""

    def ask(self, body: JsonObject) -> JsonObject:
        """Return the request as it is.

        Raises:
            Refusal: It has no messages.
        """
        if not isinstance(body.get("messages"), list):
            raise Refusal(400, "the request has no list of messages", "invalid_request")
        return body

    def answer(self, answer: JsonObject, body: JsonObject) -> JsonObject:
        """Return the answer without what was not asked for."""
        return visible_answer(answer, body)

    def writer(self, body: JsonObject) -> StreamWriter:
        """Return what passes events on."""
        return PassingWriter(body)
