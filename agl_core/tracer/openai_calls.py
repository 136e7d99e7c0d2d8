"""Chat completions of OpenAI clients in the agent's process, as spans where no proxy records them.

    client.chat.completions.create | parse     sync, async, streamed, with_raw_response
        in an attempt whose tracer is instrumented, to another server than the recording proxy

A call gets the span that the proxy would make: request, answer, usage, and token ids and log-probs
if the server returned them. Requests are sent as they are, so the agent asks for these itself
(vLLM: `extra_body={"return_token_ids": True}`, `logprobs=True`).

Of several choices the first one is recorded. A stream that was not read to its end, or a chunk of
which could not be recorded, has its text so far and no token ids: they would have a hole.
"""

import functools
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span

from agl_core import semconv
from agl_core.llm_proxy.answer_shape import check_answer
from agl_core.llm_proxy.capture import JsonObject, request_attributes
from agl_core.llm_proxy.capture import response_attributes as answer_attributes
from agl_core.llm_proxy.stream import StreamedAnswer
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.attributes import describe_exception, to_plain
from agl_core.tracer.current import get_current_attempt
from agl_core.tracer.recording import set_status

if TYPE_CHECKING:  # the tracer builds on this module
    from agl_core.tracer.otel import OtelTracer

logger = logging.getLogger(__name__)

_PROXY_PATH = re.compile(r"/rollout/[^/]+/attempt/[^/]+")
_PROXY_HEADER = "x-rollout-id"
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
    if _goes_through_proxy(resource._client, request):
        return None
    current = get_current_attempt()
    if current is None:
        _note_call_outside()
        return None
    tracer = next((t for t in _tracers if t is current.tracer), None)
    if tracer is None:
        return None
    if isinstance(request.get("messages"), Iterator):
        request["messages"] = list(request["messages"])
    try:
        attributes = request_attributes(_sent_fields(request))
    except Exception:
        logger.warning("request of a model call not recorded", exc_info=True)
        attributes = {}
    trace = tracer.find_open(current.rollout_id, current.attempt_id)
    if trace is not None:  # servers may repeat their response ids: the number tells calls apart
        attributes[semconv.CALL_INDEX] = trace.next_call_index()
    span = tracer.start_span(semconv.LLM_CALL_SPAN, attributes)
    return _CallRecorder(span, trace)


def _goes_through_proxy(client: Any, request: Mapping[str, Any]) -> bool:
    """Say whether the recording proxy records a call: its path or its headers name the attempt."""
    if _PROXY_PATH.search(str(client.base_url)):
        return True
    headers = {**client.default_headers, **(request.get("extra_headers") or {})}
    return any(name.lower() == _PROXY_HEADER for name in headers)


def _note_call_outside() -> None:
    """Count a call without an attempt for each tracer that has attempts open; warn of the first.

    Most come from threads that an agent starts without its context.
    """
    for tracer in {id(tracer): tracer for tracer in list(_tracers)}.values():
        if not tracer.has_open_attempts():
            continue
        with _lock:
            tracer.unattributed_calls += 1
            is_first = tracer.unattributed_calls == 1
        if is_first:
            logger.warning(
                "a model call outside of any attempt is not recorded, though attempts are open; a "
                "thread that an agent starts needs its context: contextvars.copy_context().run "
                "(said once, see unattributed_calls)"
            )


def _sent_fields(request: Mapping[str, Any]) -> JsonObject:
    """Return the body of a request from the arguments of the call."""
    from openai import NotGiven, Omit

    fields = {k: v for k, v in request.items() if not isinstance(v, NotGiven | Omit)}
    return to_plain({**fields, **(fields.get("extra_body") or {})}, with_defaults=False)


class _CallRecorder:
    """The span of one call, until its answer is complete."""

    def __init__(self, span: Span, trace: AttemptTrace | None) -> None:
        self._span = span
        self._trace = trace
        self._forget: Callable[[], None] = lambda: None
        """What an open stream is told to forget when it has ended."""

    def fail(self, error: BaseException) -> None:
        """End the span as failed."""
        set_status(self._span, "ERROR", describe_exception(error))
        self._span.end()

    def finish(self, result: Any) -> Any:
        """Record an answer, a stream's when it has ended, and return what the agent gets."""
        from openai import AsyncStream, Stream
        from openai.types.chat import ChatCompletion

        # LangChain and others ask for the raw response; it keeps what it parsed.
        answer = result
        if type(result).__name__ == "LegacyAPIResponse":
            try:
                answer = result.parse()
            except Exception as error:  # noqa: BLE001 - the agent may want nothing but the text
                self.fail(error)
                return result
        if isinstance(answer, Stream):
            self._follow(answer)
        elif isinstance(answer, AsyncStream):
            self._follow_async(answer)
        else:
            is_chat = isinstance(answer, ChatCompletion)
            self._end(to_plain(answer, with_defaults=False) if is_chat else None)
        return result

    def _follow(self, stream: Any) -> None:
        """Record what is read of a stream, until it ends or is closed, or the attempt ends."""
        chunks, close, gathered = stream._iterator, stream.close, self._gather()

        def passed_on() -> Generator[Any]:
            try:
                for chunk in chunks:
                    _add_chunk(gathered, chunk)
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
                    _add_chunk(gathered, chunk)
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

    def _gather(self) -> StreamedAnswer:
        """Return what gathers a stream; one that is left half-read ends with its attempt."""
        gathered = StreamedAnswer()
        if self._trace is not None:
            self._forget = self._trace.before_close(lambda: self._end(gathered.answer()))
        return gathered

    def _end(self, answer: JsonObject | None) -> None:
        """Record an answer, as far as there is one, and end the span; once."""
        self._forget()
        if not self._span.is_recording():
            return
        try:
            first = {**(answer or {}), "choices": ((answer or {}).get("choices") or [])[:1]}
            if check_answer(first) is None:
                self._span.set_attributes(answer_attributes(first, {}))
        except Exception:
            logger.warning("answer of a model call not recorded", exc_info=True)
        self._span.end()


def _add_chunk(gathered: StreamedAnswer, chunk: Any) -> None:
    """Take one chunk of a stream; never fail the agent for it."""
    was_whole = gathered.defect is None
    try:
        gathered.add(to_plain(chunk, with_defaults=False))
    except Exception as error:  # noqa: BLE001 - the agent's stream goes on
        gathered.spoil(describe_exception(error))
    if was_whole and gathered.defect:
        logger.warning("chunk of a model call not recorded, nor its tokens: %s", gathered.defect)
