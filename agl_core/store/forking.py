"""Locks that a fork leaves free.

A lock that another thread holds while the process forks stays held in the child for ever, because
that thread is not there. And what it guards may be half done: SQLite keeps the locks of a file's
open connections in memory of the process, and a child that inherits them takes them for its own.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_guard = threading.RLock()
_before: "weakref.WeakKeyDictionary[Any, Callable[[], Callable[[], None] | None]]" = (
    weakref.WeakKeyDictionary()
)
"""Locks, and what is to be called once each is held; weak on both sides."""
_held: list[Any] = []
"""Locks that the fork under way holds."""


def fork_safe_lock(before_fork: Callable[[], None] | None = None) -> "threading.RLock":
    """Return a reentrant lock that the forking thread takes before a fork and frees in both
    processes after it.

    Who holds one may not wait for another.

    Args:
        before_fork: A bound method, held weakly; called with the lock held.
    """
    lock = threading.RLock()
    with _guard:
        _before[lock] = weakref.WeakMethod(before_fork) if before_fork else lambda: None
    return lock


def _take() -> None:
    _guard.acquire()
    for lock, call in list(_before.items()):
        lock.acquire()
        _held.append(lock)
        if (before_fork := call()) is not None:
            before_fork()


def _free() -> None:
    while _held:
        _held.pop().release()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_free, after_in_child=_free)
