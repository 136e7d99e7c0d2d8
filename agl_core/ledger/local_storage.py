"""The ledger in a local folder: a hard link makes each key appear whole, once."""

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from agl_core.errors import ConflictError, LedgerError
from agl_core.ledger.storage import check_key


class LocalStorage:
    """Write-once files below a local folder (the `Storage` protocol).

    A key is written to a hidden temporary file, flushed to disk, and linked to its name, which
    fails where the name exists. File systems without hard links are refused at the first write.
    """

    conditional_put = True
    conditional_multipart = True

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()
        self.uri = str(self.root)

    def probe(self) -> bool:
        """Return True: a link fails where the name exists.

        Raises:
            LedgerError: The folder, or the nearest one above it that exists, cannot be written.
        """
        place = next(path for path in (self.root, *self.root.parents) if path.exists())
        if not place.is_dir():
            raise LedgerError(f"ledger {self.uri}: cannot write there: {place} is not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise LedgerError(f"ledger {self.uri}: cannot write there: no right to write {place}")
        return self.conditional_put

    def read(self, key: str) -> bytes:
        """Return the whole content of a small file."""
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            raise LedgerError(f"ledger {self.uri}: cannot read {key}: {error.strerror}") from error

    def open(self, key: str) -> BinaryIO:
        """Return a seekable binary reader."""
        try:
            return self._path(key).open("rb")
        except OSError as error:
            raise LedgerError(f"ledger {self.uri}: cannot read {key}: {error.strerror}") from error

    def write_once(self, key: str, data: bytes) -> None:
        """Write a new key."""
        self._publish(key, lambda file: file.write(data))

    def put_file(self, key: str, path: Path) -> None:
        """Write a new key from a local file, in parts."""
        with path.open("rb") as source:
            self._publish(key, lambda file: shutil.copyfileobj(source, file, 1 << 20))

    def replace(self, key: str, data: bytes) -> None:
        """Write a key that may change; it is always whole, and not synced to disk."""
        path = self._path(key)
        temporary = path.parent / f".writing-{uuid.uuid4().hex}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise LedgerError(
                f"ledger {self.uri}: cannot write {key}: {error.strerror}{_next_step(error)}"
            ) from error

    def exists(self, key: str) -> bool:
        """Say whether the key has been written."""
        return self._path(key).is_file()

    def list(self, prefix: str) -> list[str]:
        """Return all keys that start with a prefix ending in `/`, sorted."""
        folder = self.root / prefix
        return sorted(
            path.relative_to(self.root).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        )

    def local_path(self, key: str) -> Path | None:
        """Return where a key lies on disk."""
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _publish(self, key: str, fill: Callable[[BinaryIO], object]) -> None:
        path = self._path(key)
        new_folders = [folder for folder in path.parents if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not mkstemp, whose files only their owner may read.
            temporary = path.parent / f".writing-{uuid.uuid4().hex}"
            try:
                with temporary.open("xb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                _link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except _KeyTaken as error:
            raise ConflictError(
                f"ledger {self.uri}: {key} exists; keys are written once"
            ) from error
        except OSError as error:
            for folder in new_folders:
                with suppress(OSError):  # not made, or another writer's file is in it by now
                    folder.rmdir()
            raise LedgerError(
                f"ledger {self.uri}: cannot write {key}: {error.strerror}{_next_step(error)}"
            ) from error


def _next_step(error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return ". Make room there and start the run again: it goes on where its ledger ends"


class _KeyTaken(Exception):  # noqa: N818 - a verdict of this module
    """The name exists."""


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise _KeyTaken from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
