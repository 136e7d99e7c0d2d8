"""OpenAI's legacy completions: a prompt as text or as token ids, passed on as they are.

vLLM has a prompt's ids in each choice; log-probs are parallel lists. Recorded as a chat completion
whose one message is the prompt.
"""

from agl_core import semconv
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.dialect import Dialect, PassingWriter, StreamWriter
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.visible import visible_answer


class CompletionsDialect(Dialect):
    """`POST /v1/completions`."""

    upstream_path = "/completions"

    def ask(self, body: JsonObject) -> JsonObject:
        """Return the request, with its one prompt out of a list.

        Raises:
            Refusal: It has no prompt or several, or wants the prompt in the answer.
        """
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int:
            prompt = prompt[0]
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if isinstance(prompt, list) and prompt and not is_ids:
            raise Refusal(400, "several prompts: send one request for each", "unsupported")
        if not prompt or not (is_ids or isinstance(prompt, str)):
            raise Refusal(400, "the request has no prompt", "invalid_request")
        if type(body.get("logprobs") or 0) is not int:
            raise Refusal(400, "logprobs is not a number of tokens", "invalid_request")
        if body.get("echo"):
            raise Refusal(
                400, "echo is not supported: the recorded ids would have the prompt", "unsupported"
            )
        return {**body, "prompt": prompt}

    def add_recording(self, asked: JsonObject, seed: int) -> JsonObject:
        """Return a request that asks for token ids and log-probs too."""
        num_logprobs = max(1, asked.get("logprobs") or 0)
        added = {"logprobs": num_logprobs, "return_token_ids": True}
        return {**asked, **added, **capture.added_fields(asked, seed)}

    def request_attributes(self, asked: JsonObject) -> JsonObject:
        """Return the span attributes of a request, its prompt as a message; ids have no text."""
        prompt = asked["prompt"] if isinstance(asked["prompt"], str) else None
        messages = [{"role": "user", "content": prompt}]
        recorded = capture.request_attributes({**asked, "messages": messages})
        return {**recorded, semconv.OPERATION: "text_completion"}

    def as_chat(self, answer: JsonObject) -> JsonObject:
        """Return an answer, or a chunk of one, as chat completions have it."""
        chat = {**answer, "choices": [_as_chat_choice(choice) for choice in answer["choices"]]}
        for choice in answer["choices"]:
            if chat.get("prompt_token_ids") is None:
                chat["prompt_token_ids"] = choice.get("prompt_token_ids")
        return chat

    def answer(self, answer: JsonObject, body: JsonObject) -> JsonObject:
        """Return the answer without what was not asked for."""
        return visible_answer(answer, body)

    def writer(self, body: JsonObject) -> StreamWriter:
        """Return what passes events on."""
        return PassingWriter(body)


def _as_chat_choice(choice: JsonObject) -> JsonObject:
    message = {"role": "assistant", "content": choice.get("text")}
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
        content = [
            {"token": token, "logprob": value} for token, value in zip(tokens, values, strict=True)
        ]
        logprobs = {"content": content}
    return {**choice, "message": message, "delta": message, "logprobs": logprobs}
