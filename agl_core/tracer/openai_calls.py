"""Chat completions of OpenAI clients in the agent's process, as spans where no proxy records them.

    client.chat.completions.create | parse     sync, async, streamed, with_raw_response
        in an attempt whose tracer is instrumented, to another server than the recording proxy

A call gets the span that the proxy would make: request, answer, usage, and token ids and log-probs
if the server returned them. Requests are sent as they are, so the agent asks for these itself
(vLLM: `extra_body={"return_token_ids": True}`, `logprobs=True`).
"""

import functools
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span

from agl_core import semconv
from agl_core.llm_proxy.capture import JsonObject, check_answer, request_attributes
from agl_core.llm_proxy.capture import response_attributes as answer_attributes
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.attributes import to_plain
from agl_core.tracer.current import get_current_attempt
from agl_core.tracer.recording import set_status

if TYPE_CHECKING:  # the tracer builds on this module
    from agl_core.tracer.otel import OtelTracer

logger = logging.getLogger(__name__)

_PROXY_PATH = re.compile(r"/rollout/[^/]+/attempt/[^/]+")
_METHODS = ("create", "parse")

_lock = threading.Lock()
_tracers: list["OtelTracer"] = []
_originals: list[tuple[type, str, Callable[..., Any]]] = []


def instrument_openai(tracer: "OtelTracer") -> None:
    """Record the chat completions of this tracer's attempts."""
    with _lock:
        if not _tracers:
            _patch()
        _tracers.append(tracer)


def uninstrument_openai(tracer: "OtelTracer") -> None:
    """Undo one `instrument_openai`; with the last one, openai is as it was."""
    with _lock:
        mine = [number for number, other in enumerate(_tracers) if other is tracer]
        if not mine:
            return
        del _tracers[mine[0]]
        if not _tracers:
            for owner, name, original in _originals:
                setattr(owner, name, original)
            _originals.clear()


def _patch() -> None:
    from openai.resources.chat.completions import AsyncCompletions, Completions

    for owner, wrap in ((Completions, _wrap), (AsyncCompletions, _wrap_async)):
        for name in _METHODS:
            original = getattr(owner, name)
            _originals.append((owner, name, original))
            setattr(owner, name, wrap(original))


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(resource: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _begin(resource, kwargs)
        if recorder is None:
            return original(resource, *args, **kwargs)
        try:
            result = original(resource, *args, **kwargs)
        except BaseException as error:
            recorder.fail(error)
            raise
        return recorder.finish(result)

    return call


def _wrap_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def call(resource: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _begin(resource, kwargs)
        if recorder is None:
            return await original(resource, *args, **kwargs)
        try:
            result = await original(resource, *args, **kwargs)
        except BaseException as error:
            recorder.fail(error)
            raise
        return recorder.finish(result)

    return call


def _begin(resource: Any, request: dict[str, Any]) -> "_CallRecorder | None":
    """Start the span of a call; None where it is not to be recorded here.

    Messages that can be read only once become a list in the request.
    """
    current = get_current_attempt()
    tracer = next((t for t in _tracers if current and t is current.tracer), None)
    if current is None or tracer is None:
        return None
    if _PROXY_PATH.search(str(resource._client.base_url)):
        return None
    if isinstance(request.get("messages"), Iterator):
        request["messages"] = list(request["messages"])
    try:
        attributes = request_attributes(_sent_fields(request))
    except Exception:
        logger.warning("request of a model call not recorded", exc_info=True)
        attributes = {}
    trace = tracer.find_open(current.rollout_id, current.attempt_id)
    span = tracer.start_span(semconv.LLM_CALL_SPAN, attributes)
    return _CallRecorder(span, trace)


def _sent_fields(request: Mapping[str, Any]) -> JsonObject:
    """Return the body of a request from the arguments of the call."""
    from openai import NotGiven, Omit

    fields = {k: v for k, v in request.items() if not isinstance(v, NotGiven | Omit)}
    return to_plain({**fields, **(fields.get("extra_body") or {})})


class _CallRecorder:
    """The span of one call, until its answer is complete."""

    def __init__(self, span: Span, trace: AttemptTrace | None) -> None:
        self._span = span
        self._trace = trace

    def fail(self, error: BaseException) -> None:
        """End the span as failed."""
        set_status(self._span, "ERROR", f"{type(error).__name__}: {error}")
        self._span.end()

    def finish(self, result: Any) -> Any:
        """Record an answer, a stream's when it has ended, and return what the agent gets."""
        from openai import AsyncStream, Stream
        from openai.types.chat import ChatCompletion

        # LangChain and others ask for the raw response; it keeps what it parsed.
        answer = result.parse() if type(result).__name__ == "LegacyAPIResponse" else result
        if isinstance(answer, Stream):
            self._follow(answer)
        elif isinstance(answer, AsyncStream):
            self._follow_async(answer)
        else:
            self._end(to_plain(answer) if isinstance(answer, ChatCompletion) else None)
        return result

    def _follow(self, stream: Any) -> None:
        """Record what is read of a stream, until it ends or is closed, or the attempt ends."""
        chunks, close, gathered = stream._iterator, stream.close, self._gather()

        def passed_on() -> Generator[Any]:
            try:
                for chunk in chunks:
                    gathered.add(chunk)
                    yield chunk
            except Exception as error:
                self.fail(error)
                raise
            finally:
                self._end(gathered.answer())

        def closed() -> None:
            self._end(gathered.answer())
            close()

        stream._iterator, stream.close = passed_on(), closed

    def _follow_async(self, stream: Any) -> None:
        chunks, close, gathered = stream._iterator, stream.close, self._gather()

        async def passed_on() -> AsyncGenerator[Any]:
            try:
                async for chunk in chunks:
                    gathered.add(chunk)
                    yield chunk
            except Exception as error:
                self.fail(error)
                raise
            finally:
                self._end(gathered.answer())

        async def closed() -> None:
            self._end(gathered.answer())
            await close()

        stream._iterator, stream.close = passed_on(), closed

    def _gather(self) -> "_StreamedAnswer":
        """Return what gathers a stream; one that is left half-read ends with its attempt."""
        gathered = _StreamedAnswer()
        if self._trace is not None:
            self._trace.before_close(lambda: self._end(gathered.answer()))
        return gathered

    def _end(self, answer: JsonObject | None) -> None:
        """Record an answer, as far as there is one, and end the span; once."""
        if not self._span.is_recording():
            return
        try:
            first = {**(answer or {}), "choices": (answer or {}).get("choices", [])[:1]}
            if check_answer(first) is None:
                self._span.set_attributes(answer_attributes(first, {}))
        except Exception:
            logger.warning("answer of a model call not recorded", exc_info=True)
        self._span.end()


class _StreamedAnswer:
    """Puts the chunks of a stream together, with the token ids that openai's own helper loses."""

    def __init__(self) -> None:
        from openai.lib.streaming.chat import ChatCompletionStreamState

        self._state = ChatCompletionStreamState()
        self._num_chunks = 0
        self._prompt_token_ids: list[int] | None = None
        self._token_ids: list[int] = []

    def add(self, chunk: Any) -> None:
        """Take one chunk."""
        try:
            self._state.handle_chunk(chunk)
            self._num_chunks += 1
            extra = chunk.model_extra or {}
            self._prompt_token_ids = extra.get("prompt_token_ids") or self._prompt_token_ids
            for choice in chunk.choices[:1]:
                self._token_ids += (choice.model_extra or {}).get("token_ids") or []
        except Exception:
            logger.warning("chunk of a model call not recorded", exc_info=True)

    def answer(self) -> JsonObject | None:
        """Return the chat completion so far; None where no chunk came."""
        if not self._num_chunks:
            return None
        snapshot = self._state.current_completion_snapshot
        answer = to_plain(snapshot)
        answer["prompt_token_ids"] = self._prompt_token_ids
        for choice in answer["choices"][:1]:
            choice["token_ids"] = self._token_ids or None
        return answer
