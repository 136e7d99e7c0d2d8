"""Which failure kind an agent's exception is, and how it is put down.

The question behind the kind: may another try get it right? Failures of the model server, the proxy,
the network or this host are `infra_error` (`agl_core.runner.infrastructure`); everything else that
an agent raises is its own.
"""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agl_core.runner.infrastructure import is_infrastructure
from agl_core.types.outcome import FailureKind

_OUR_FOLDER = f"{Path(__file__).parent.parent}{os.sep}"
_LIBRARY_FOLDERS = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_MAX_CHARS = 100_000
"""Of a message or traceback; an agent's exception may hold a whole response."""


def classify_exception(error: BaseException) -> FailureKind:
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
    message = " ".join(text_of(error).split())
    return _storable(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def text_of(error: BaseException) -> str:
    """Return an exception's text; an agent's own class may fail to give one."""
    try:
        return str(error)
    except Exception as fault:  # noqa: BLE001 - any code may be in there
        return f"<its text cannot be had: {type(fault).__name__}>"


def locate_exception(error: BaseException) -> str:
    """Return where the agent's own code raised: `file.py:12 in function`; empty if unknown.

    That is the innermost line which is neither ours nor of an installed package; if there is none,
    the agent's own first line.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(_origin(error).__traceback__)
        if not frame.filename.startswith((_OUR_FOLDER, "<"))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    frame = own[-1] if own else frames[0] if frames else None
    if frame is None:
        return ""
    return _storable(f"{short_path(frame.filename)}:{frame.lineno} in {frame.name}")


def locate_function(function: Any) -> str:
    """Return where a function is defined: `file.py:12 in function`; empty if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return _storable(f"{short_path(code.co_filename)}:{code.co_firstlineno} in {code.co_name}")


def short_path(path: str) -> str:
    """Return a path as seen from the working directory, if it is below that."""
    here = f"{Path.cwd()}{os.sep}"
    return path.removeprefix(here)


def _origin(error: BaseException) -> BaseException:
    """Return what the agent raised, where we raised something in its place."""
    cause = error.__cause__
    return cause if cause is not None and not isinstance(cause, Exception) else error


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
