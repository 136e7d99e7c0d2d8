"""Processes that agents start in this process: they end with their attempt, or with this process.

An agent in a thread or in this event loop starts its tools as children of this process. Each
`subprocess.Popen` made in an attempt's context is noted (also through `subprocess.run` and
asyncio), so `subprocess.Popen.__init__` is wrapped once. The children of an attempt are killed with
all their descendants when the attempt is given up (deadline, cancellation); those that an agent
leaves running on its return may serve the next rollouts, and are killed when this process ends.

Processes of `multiprocessing` are noted too, and killed when this process ends, which otherwise
waits for them; not with their attempt: a pool of them may serve other rollouts.

Not noted: `os.fork`, and threads that run without the agent's context. A process that is killed
with SIGKILL kills nothing. `rollout.isolation: process` covers all of these.
"""

import functools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from weakref import WeakSet

AnyPopen = subprocess.Popen[Any]

_lock = threading.Lock()
_left: list[AnyPopen] = []
"""Children that ended attempts left running."""
_of_multiprocessing: WeakSet[BaseProcess] = WeakSet()
"""Processes of `multiprocessing` that agents started."""
_running: set["AttemptChildren"] = set()
_installed_in = 0
"""Id of the process that kills its children at its end."""


class AttemptOver(RuntimeError):  # noqa: N818 - it tells the agent that it was given up
    """An agent that was given up tried to start another process."""


class AttemptChildren:
    """The processes that one attempt started."""

    def __init__(self) -> None:
        self._children: list[AnyPopen] = []
        self._is_over = False

    def check(self) -> None:
        """Let the agent start a process.

        Raises:
            AttemptOver: The attempt was given up.
        """
        if self._is_over:
            raise AttemptOver("the attempt is over: its agent can start no more processes")

    def add(self, child: AnyPopen) -> None:
        """Note a child, or kill it if the attempt was given up meanwhile."""
        with _lock:
            self._children.append(child)
            is_over = self._is_over
        if is_over:
            self.kill()

    def give_up(self) -> None:
        """Kill the children, and let the agent start no more."""
        with _lock:
            self._is_over = True
        self.kill()

    def kill(self) -> None:
        """Kill the children that still run, and everything that they started."""
        with _lock:
            children = list(self._children)
        kill_trees(child.pid for child in children if child.returncode is None)

    def leave(self) -> None:
        """Keep the children that still run until this process ends."""
        with _lock:
            _left[:] = [child for child in _left if child.returncode is None]
            _left.extend(child for child in self._children if child.returncode is None)


_owner: ContextVar[AttemptChildren | None] = ContextVar("agl_attempt_children", default=None)


@contextmanager
def attempt_children() -> Generator[AttemptChildren]:
    """Note the processes that the code of the block starts, in its tasks and threads too."""
    _install()
    children = AttemptChildren()
    token = _owner.set(children)
    with _lock:
        _running.add(children)
    try:
        yield children
    finally:
        _owner.reset(token)
        with _lock:
            _running.discard(children)
        children.leave()


def kill_all() -> None:
    """Kill what agents of this process started and left running."""
    if _installed_in != os.getpid():  # those of the process that this one was forked from
        return
    for children in list(_running):
        children.give_up()
    with _lock:
        noted = set(_of_multiprocessing)
        left = [child.pid for child in _left if child.returncode is None]
    processes = [child for child in multiprocessing.active_children() if child in noted]
    kill_trees([*left, *(child.pid for child in processes if child.pid is not None)])


def kill_trees(roots: Iterable[int]) -> None:
    """Kill processes with all their descendants, and the process groups that these lead."""
    roots = list(roots)
    if not roots:
        return
    for pid in [*roots, *descendants(roots)]:
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)


def descendants(roots: Iterable[int]) -> list[int]:
    """Return the ids of all processes below these; empty where there is no /proc."""
    below: defaultdict[int, list[int]] = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, _, fields = status.read_text(errors="replace").rpartition(")")
            below[int(fields.split()[1])].append(int(status.parent.name))
    found: list[int] = []
    wanted = list(roots)
    while wanted:
        children = below.pop(wanted.pop(), [])
        found += children
        wanted += children
    return found


def _install() -> None:
    """Note children from now on, and kill those that are left when this process ends."""
    global _installed_in
    with _lock:
        if _installed_in == os.getpid():
            return
        is_forked, _installed_in = _installed_in != 0, os.getpid()
        _left.clear()
        _of_multiprocessing.clear()
        _running.clear()
    util.Finalize(None, kill_all, exitpriority=100)  # also in processes of multiprocessing
    if not is_forked:
        _wrap_popen()
        _wrap_multiprocessing()


def _wrap_multiprocessing() -> None:
    start = BaseProcess.start

    @functools.wraps(start)
    def start_noted(self: BaseProcess) -> None:
        owner = _owner.get()
        if owner is not None:
            owner.check()
        start(self)
        if owner is not None:
            with _lock:
                _of_multiprocessing.add(self)

    BaseProcess.start = start_noted


def _wrap_popen() -> None:
    start = subprocess.Popen.__init__

    @functools.wraps(start)
    def start_noted(self: AnyPopen, *args: Any, **kwargs: Any) -> None:
        owner = _owner.get()
        if owner is not None:
            owner.check()
        start(self, *args, **kwargs)
        if owner is not None:
            owner.add(self)

    subprocess.Popen.__init__ = start_noted
