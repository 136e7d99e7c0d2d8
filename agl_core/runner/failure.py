"""Which failure kind an agent's exception is, and how it is put down.

The question behind the kind: may another try get it right? Failures of the model server, the proxy,
the network or this host are `infra_error` (`agl_core.runner.infrastructure`); everything else that
an agent raises is its own.
"""

import traceback
from collections.abc import Iterator

from agl_core.runner.infrastructure import is_infrastructure
from agl_core.types.outcome import FailureKind


def classify_exception(error: Exception) -> FailureKind:
    """Return `infra_error` or `agent_error` for what an agent raised.

    An explicit cause (`raise X from error`) decides for a wrapper; a group is an infrastructure
    error only if all of its members are.
    """
    if isinstance(error, ExceptionGroup):
        kinds = {classify_exception(member) for member in error.exceptions}
        return kinds.pop() if len(kinds) == 1 else FailureKind.AGENT_ERROR
    if any(is_infrastructure(link) for link in _causes(error)):
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
    """Return a text that UTF-8 can hold: lone surrogates are written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
