"""Which failure kind an agent's exception is.

The question behind it: may another try get it right? Errors of the model server, the proxy or the
network are `infra_error`; everything else an agent raises is its own. Client libraries are
recognised by the names of their classes, so that none needs to be imported for it.
"""

import traceback
from collections.abc import Iterator

from agl_core.types.outcome import FailureKind

_MAX_CHARS = 100_000
"""Of a message or traceback; an agent's exception may hold a whole response."""
_RETRIABLE_STATUS = frozenset({408, 409, 429})
_CONNECTION_CLASSES = {
    "openai": frozenset({"APIConnectionError"}),  # APITimeoutError is one
    "anthropic": frozenset({"APIConnectionError"}),
    "httpx": frozenset({"TransportError"}),
    "httpx2": frozenset({"TransportError"}),  # what openai 3 is built on
}
_STATUS_CLASSES = {
    "openai": "APIStatusError",
    "anthropic": "APIStatusError",
    "httpx": "HTTPStatusError",
    "httpx2": "HTTPStatusError",
}


def classify_exception(error: Exception) -> FailureKind:
    """Return `infra_error` or `agent_error` for what an agent raised.

    An explicit cause (`raise X from error`) decides for a wrapper; a group is an infrastructure
    error only if all of its members are.
    """
    if isinstance(error, ExceptionGroup):
        kinds = {classify_exception(member) for member in error.exceptions}
        return kinds.pop() if len(kinds) == 1 else FailureKind.AGENT_ERROR
    if any(_is_infrastructure(link) for link in _causes(error)):
        return FailureKind.INFRA_ERROR
    return FailureKind.AGENT_ERROR


def describe_exception(error: BaseException) -> str:
    """Return one line: type and message."""
    message = " ".join(str(error).split())
    return _storable(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def format_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it."""
    return _storable("".join(traceback.format_exception(error)))


def _storable(text: str) -> str:
    """Return a text that UTF-8 can hold, with lone surrogates as escapes; of a very long one its
    beginning and its end.
    """
    if len(text) > _MAX_CHARS:
        half = _MAX_CHARS // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):  # also UpstreamError and TransientError
        return True
    for cls in type(error).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls.__name__ in _CONNECTION_CLASSES.get(package, ()):
            return True
        if cls.__name__ == _STATUS_CLASSES.get(package):
            return _is_retriable_status(error)
    return _is_broken_stream(error)


def _is_broken_stream(error: BaseException) -> bool:
    """Say whether openai raised this for an error event of the server, as the proxy sends it."""
    cls = type(error)
    is_event = cls.__name__ == "APIError" and cls.__module__.partition(".")[0] == "openai"
    return is_event and getattr(error, "type", None) == "server_error"


def _is_retriable_status(error: BaseException) -> bool:
    """Judge by the HTTP status: the server failed (5xx), or asks to come again."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
    return isinstance(status, int) and (status >= 500 or status in _RETRIABLE_STATUS)
