"""Bytes under write-once keys: the one way to the ledger's files.

A backend promises:

- a key, once written, never changes (but by `replace`); a second write raises `ConflictError` and
leaves the first in place;
- a key becomes visible with its whole content or not at all, and a write that has returned survives
a crash of
  this process (of the machine, as far as the disk or the store keeps its word);
- `list` sees every key whose write has returned.

A crash may leave temporary files or unfinished multipart uploads; they are never listed as keys.
"""

import re
from pathlib import Path
from typing import BinaryIO, Protocol

from agl_core.config import S3Settings
from agl_core.errors import ConfigError
from agl_core.ledger.s3_access import ENVIRONMENT, S3Access

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Needs no percent-encoding, in which stores differ: some refuse `%2F`, `+` or non-ASCII keys."""


class Storage(Protocol):
    """A place for immutable files, by key (a relative path with `/`)."""

    uri: str
    """Root of the store, a local path or `s3://bucket/prefix`."""
    conditional_put: bool
    """Whether the store itself refuses a second write of a key; what `probe` found, or what the
    opener was told."""
    conditional_multipart: bool
    """Whether it refuses that of a large file too. Where it does not, `put_file` needs keys that no
    other process writes."""

    def probe(self) -> bool:
        """Find out whether the store can be written and refuses second writes itself.

        Returns:
            The new value of `conditional_put`.

        Raises:
            LedgerError: It cannot be written.
        """
        ...

    def read(self, key: str) -> bytes:
        """Return the whole content of a small file.

        Raises:
            LedgerError: There is no such key, or it cannot be read.
        """
        ...

    def open(self, key: str) -> BinaryIO:
        """Return a seekable binary reader, for files that are read in parts.

        Raises:
            LedgerError: There is no such key, or it cannot be read.
        """
        ...

    def write_once(self, key: str, data: bytes) -> None:
        """Write a new key.

        Raises:
            ConflictError: The key exists.
            LedgerError: It cannot be written (no space, no permission, no connection).
        """
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Write a new key from a local file, in parts.

        Raises:
            ConflictError: The key exists.
            LedgerError: It cannot be written.
        """
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Write a key that may change: signs of life, and nothing of the record.

        Raises:
            LedgerError: It cannot be written.
        """
        ...

    def exists(self, key: str) -> bool:
        """Say whether the key has been written.

        Raises:
            LedgerError: The store cannot be asked.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Return all keys that start with a prefix ending in `/`, sorted.

        Raises:
            LedgerError: The store cannot be asked.
        """
        ...

    def local_path(self, key: str) -> Path | None:
        """Return where a key lies on this machine's disk, or None where it does not."""
        ...


def open_storage(
    uri: str, access: S3Access = ENVIRONMENT, *, conditional_put: bool = True
) -> Storage:
    """Return the storage behind a local path or an `s3://bucket/prefix` URI; nothing is asked of it
    yet.

    Args:
        uri: Where it is.
        access: How S3 is reached.
        conditional_put: What the preflight found out about an S3 store.

    Raises:
        ConfigError: The URI has another scheme or names no bucket, or settings of S3 come with a
            local path.
    """
    if uri.startswith("s3://"):
        if not re.match(r"s3://[a-z0-9][a-z0-9._-]+(/|$)", uri, re.IGNORECASE):
            raise ConfigError(f"ledger {uri!r} names no bucket: use s3://bucket/prefix")
        from agl_core.ledger.s3_storage import S3Storage

        return S3Storage(uri, access, conditional_put=conditional_put)
    if access.settings != S3Settings():
        raise ConfigError(f"s3: settings of an s3:// ledger; this one is {uri}")
    if "://" in uri and not uri.startswith("file://"):
        raise ConfigError(f"ledger {uri!r}: use a local folder or s3://bucket/prefix")
    from agl_core.ledger.local_storage import LocalStorage

    return LocalStorage(Path(uri.removeprefix("file://")))


def check_key(key: str) -> str:
    """Return the key, or raise.

    Raises:
        ValueError: The key is empty, absolute, has empty, dot or hidden segments, or characters
            that some stores refuse in a URL.
    """
    if not all(is_key_segment(part) for part in key.split("/")):
        raise ValueError(
            f"bad ledger key {key!r}: use relative segments of letters, digits, dashes, dots and "
            "underscores, without leading dots"
        )
    return key


def is_key_segment(name: str) -> bool:
    """Say whether a name can stand between two slashes of a key, in every store."""
    return _SEGMENT.fullmatch(name) is not None
