"""Temporary folders that outlive no process for long: what a killed one left, the next one removes.

Whoever uses a folder holds a lock on it, which the kernel releases when the process ends.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "agl-scratch-"


@contextmanager
def scratch_folder(name: str) -> Generator[Path]:
    """Yield an empty local folder that is removed at the end."""
    _remove_left_behind()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)  # another process may have looked before it was locked
        yield folder
    finally:
        # A thread that a cancellation left behind may still write there.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left_behind() -> None:
    """Remove the folders that nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, held by its process, or another user's
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
