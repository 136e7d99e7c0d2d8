"""Keep a process alive after the reader of its output is gone.

A Prefect worker reads the output of its flow runs through pipes. If the worker is killed, each
later write to such a pipe fails: an agent's `print` raises BrokenPipeError, and rich, through which
Prefect logs to the console, raises SystemExit, which ends the flow run in the middle. The same
happens to `agl run` behind a `tee` that was killed. Output that nobody reads is not worth a run, so
it goes to `os.devnull` from then on, for this process and for those that it starts later.
"""

import contextlib
import logging
import os
import select
import stat
import sys
import threading
from typing import Any

logger = logging.getLogger(__name__)

_STDOUT, _STDERR = 1, 2
_lock = threading.Lock()
_watching_pid = 0
"""The process that is watched; a forked child has no such thread."""


def outlive_output() -> None:
    """Let this process go on if the reader of its standard output or error goes away.

    Does nothing if both are files. Can be called again, and again after a fork.
    """
    global _watching_pid
    with _lock:
        if _watching_pid == os.getpid():
            return
        _watching_pid = os.getpid()
    if rich_console := sys.modules.get("rich.console"):
        # rich leaves what follows to subclasses, and Prefect makes its console itself.
        rich_console.Console.on_broken_pipe = _discard_output
    poll = select.poll()
    watched = [number for number in (_STDOUT, _STDERR) if _register(poll, number)]
    if watched:
        watch = (poll, len(watched))
        threading.Thread(target=_watch, args=watch, name="agl-output", daemon=True).start()


def _register(poll: "select.poll", descriptor: int) -> bool:
    """Watch a descriptor for errors only; return whether it is open and can lose its reader."""
    try:
        can_lose_reader = not stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        return False
    if can_lose_reader:
        poll.register(descriptor, 0)
    return can_lose_reader


def _watch(poll: "select.poll", num_watched: int) -> None:
    """Redirect each descriptor as soon as its reader is gone."""
    while num_watched:
        for descriptor, event in poll.poll():
            poll.unregister(descriptor)
            num_watched -= 1
            if not event & select.POLLNVAL:  # not closed by this process
                _redirect(descriptor)


def _redirect(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
    name = "standard output" if descriptor == _STDOUT else "standard error"
    logger.warning("the reader of this process's %s is gone; further output is discarded", name)


def _discard_output(console: Any) -> None:
    """Replace `rich.console.Console.on_broken_pipe`, which raises SystemExit.

    A write can fail before the watching thread has seen why.
    """
    console.quiet = True
    with contextlib.suppress(OSError, ValueError):  # a console on something else
        _redirect(console.file.fileno())
