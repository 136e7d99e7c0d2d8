"""One process of a strategy: how it lives, how it says why it failed, and how it is ended.

It is the leader of a process group, so that a terminal's Ctrl-C reaches its parent alone, which
then ends it in order, and so that what its agents started can be ended with it. Where its parent is
gone, killed for example, it kills its group: nobody could be told any more what it does.
"""

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from agl_core.errors import ExecutionError
from agl_core.lost_output import outlive_output

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
_ORPHAN_SECONDS = 0.5
KILL_SECONDS = 5.0
"""How long the system may take to end a process that was killed."""


class Child:
    """A process that was started.

    Args:
        context: Of `multiprocessing`: fork or spawn.
        target: A function of a module.
        args: Its arguments.
        name: Of the process.
        dies_with_parent: Whether it kills itself when its parent is gone; else `target` looks.
    """

    def __init__(
        self,
        context: BaseContext,
        target: Callable[..., None],
        args: Sequence[Any],
        name: str,
        *,
        dies_with_parent: bool = True,
    ) -> None:
        self.name = name
        self._words, words = context.Pipe(duplex=False)
        self._process = context.Process(  # pyright: ignore[reportAttributeAccessIssue]
            target=_live,
            args=(target, tuple(args), words, os.getpid(), dies_with_parent),
            name=name,
            daemon=False,  # agents may start processes
        )
        with warnings.catch_warnings():
            # From Python 3.12 on, where the process has threads: the supervisor uses none of what
            # they may hold, and forks the runners itself, without threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        words.close()
        self._is_over = False
        self._error: tuple[str, bytes | None] | None = None

    @property
    def pid(self) -> int:
        """Process id, also its group's."""
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Descriptor that is ready when the process has ended."""
        return self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        """How it ended: negative for a signal; None while it runs."""
        self._listen()  # before: a long message would block its end
        code = self._process.exitcode
        if code is not None and not self._is_over:
            self._is_over = True
            self._listen()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # what its agents left behind
        return code

    @property
    def description(self) -> str:
        """How it ended, in words."""
        why = f" ({self._error[0]})" if self._error else ""
        return f"{self.name} ended with exit code {self.exit_code}{why}"

    def error(self) -> Exception:
        """Return what it raised, or what stands for that."""
        if self._error is not None and self._error[1] is not None:
            with contextlib.suppress(Exception):  # its class cannot be loaded here
                return pickle.loads(self._error[1])
        return ExecutionError(self.description)

    def signal(self, number: int) -> None:
        """Send a signal; SIGKILL goes to all of its group."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            if self._error is None and self._words.poll(0):
                self._error = pickle.loads(self._words.recv_bytes())


def end(children: Sequence[Child], graceful_seconds: float, terminate_seconds: float) -> list[str]:
    """Wait for processes that were told to end, then end them: SIGINT, SIGTERM, SIGKILL.

    Args:
        children: The processes.
        graceful_seconds: How long they may take by themselves.
        terminate_seconds: How long they may take after each of the two signals.

    Returns:
        What is to be said of those that had to be killed.
    """
    try:
        _await_end(children, graceful_seconds)
        for number in (signal.SIGINT, signal.SIGTERM):
            _signal(children, number)
            _await_end(children, terminate_seconds)
    finally:  # also where somebody presses Ctrl-C again
        _signal(children, signal.SIGKILL)
        _await_end(children, KILL_SECONDS)
    return [f"{child.name} cannot be killed" for child in children if child.exit_code is None]


def _signal(children: Sequence[Child], number: signal.Signals) -> None:
    for child in children:
        if child.exit_code is None:
            logger.warning("%s still runs: %s", child.name, number.name)
            child.signal(number)


def _await_end(children: Sequence[Child], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(child.exit_code is None for child in children) and time.monotonic() < until:
        time.sleep(TICK_SECONDS / 2)


def is_orphan(parent_pid: int) -> bool:
    """Tell whether the parent of this process is gone."""
    return os.getppid() != parent_pid


def _live(
    target: Callable[..., None],
    args: tuple[Any, ...],
    words: Connection,
    parent_pid: int,
    dies_with_parent: bool,
) -> None:
    """Be the process: run the target; its error becomes the last words, and exit status 1."""
    os.setpgid(0, 0)
    outlive_output()
    # Inherited by fork are the parent's handlers, by spawn what it ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if dies_with_parent:
        threading.Thread(target=_die_with, args=(parent_pid,), daemon=True).start()
    try:
        target(*args)
    except KeyboardInterrupt:
        pass  # told to end
    except BaseException as error:
        if not isinstance(error, ExecutionError):  # those repeat what others have said
            logger.exception("%s failed", target.__name__)
        with contextlib.suppress(OSError):
            words.send_bytes(pickle.dumps(_last_words(error)))
        sys.exit(1)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending


def _last_words(error: BaseException) -> tuple[str, bytes | None]:
    """Return an error in words, and as it is where that can be sent."""
    text = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - whatever a class of the user does
        return text, None
    return text, pickled if isinstance(error, Exception) else None


def _die_with(parent_pid: int) -> None:
    while not is_orphan(parent_pid):
        time.sleep(_ORPHAN_SECONDS)
    os.killpg(0, signal.SIGKILL)
