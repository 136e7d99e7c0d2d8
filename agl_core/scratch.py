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


class LockedFolder:
    """An empty folder that this user alone can read, until `cleanup` or the end of this process.

    Args:
        prefix: Of its name. Folders beside it with this prefix that no process holds are removed.
        parent: Where it is made.
    """

    def __init__(self, prefix: str, parent: Path) -> None:
        _remove_left_behind(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # Another process may have looked before it was locked.
        self.path.mkdir(mode=0o700, exist_ok=True)

    def cleanup(self) -> None:
        """Remove it; a second call does nothing."""
        # A thread that a cancellation left behind may still write there.
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def scratch_folder(name: str) -> Generator[Path]:
    """Yield an empty local folder that is removed at the end."""
    parent = Path(tempfile.gettempdir())
    _remove_left_behind(_PREFIX, parent)
    folder = LockedFolder(f"{_PREFIX}{name}-", parent)
    try:
        yield folder.path
    finally:
        folder.cleanup()


def _remove_left_behind(prefix: str, parent: Path) -> None:
    """Remove the folders that nobody holds."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # removed meanwhile, held by its process, or another user's
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
