"""The ledger in a bucket, through s3fs: `If-None-Match: *` makes each key appear whole, once.

Endpoint, region and credentials come from the environment by the names that botocore reads
(`AWS_ENDPOINT_URL`, `AWS_DEFAULT_REGION`, `AWS_ACCESS_KEY_ID`, ...).
"""

import uuid
from pathlib import Path
from typing import Any, BinaryIO, cast

import s3fs
from botocore.exceptions import BotoCoreError

from agl_core.errors import ConflictError, LedgerError
from agl_core.ledger.storage import check_key

# s3fs translates what the store answers to OSError or ValueError; no answer stays botocore's.
_S3_ERRORS = (OSError, ValueError, BotoCoreError)


class S3Storage:
    """Write-once objects below `s3://bucket/prefix` (the `Storage` protocol).

    `conditional_put` is probed at construction: some stores accept `If-None-Match` and ignore it.

    Raises:
        LedgerError: The bucket cannot be written (missing, no permission, wrong credentials).
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._root = self.uri.removeprefix("s3://")
        self._fs: Any = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        self.conditional_put = self._probe()

    def read(self, key: str) -> bytes:
        """Return the whole content of a small object."""
        path = self._path(key)
        try:
            return cast("bytes", self._fs.cat_file(path))
        except _S3_ERRORS as error:
            raise LedgerError(f"ledger {self.uri}: cannot read {key}: {error}") from error

    def open(self, key: str) -> BinaryIO:
        """Return a seekable reader that fetches the ranges it needs."""
        path = self._path(key)
        try:
            return cast("BinaryIO", self._fs.open(path, "rb"))
        except _S3_ERRORS as error:
            raise LedgerError(f"ledger {self.uri}: cannot read {key}: {error}") from error

    def write_once(self, key: str, data: bytes) -> None:
        """Write a new object."""
        self._create(key, lambda path: self._fs.pipe_file(path, data, mode="create"))

    def put_file(self, key: str, path: Path) -> None:
        """Write a new object from a local file; large ones by multipart upload."""
        self._create(key, lambda target: self._fs.put_file(str(path), target, mode="create"))

    def exists(self, key: str) -> bool:
        """Say whether the object has been written."""
        path = self._path(key)
        try:
            return bool(self._fs.exists(path))
        except _S3_ERRORS as error:
            raise LedgerError(f"ledger {self.uri}: cannot look for {key}: {error}") from error

    def list(self, prefix: str) -> list[str]:
        """Return all keys that start with a prefix ending in `/`, sorted."""
        try:
            found = cast("list[str]", self._fs.find(f"{self._root}/{prefix}"))
        except _S3_ERRORS as error:
            raise LedgerError(f"ledger {self.uri}: cannot list {prefix}: {error}") from error
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def local_path(self, key: str) -> Path | None:
        """Return None: objects are not files of this machine."""
        del key
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _create(self, key: str, put: Any) -> None:
        path = self._path(key)
        if not self.conditional_put and self.exists(key):
            raise ConflictError(f"ledger {self.uri}: {key} exists; keys are written once")
        try:
            put(path)
        except FileExistsError as error:
            raise ConflictError(
                f"ledger {self.uri}: {key} exists; keys are written once"
            ) from error
        except _S3_ERRORS as error:
            raise LedgerError(f"ledger {self.uri}: cannot write {key}: {error}") from error

    def _probe(self) -> bool:
        """Write one object twice and say whether the second write was refused."""
        path = f"{self._root}/probes/{uuid.uuid4().hex}"
        try:
            self._fs.pipe_file(path, b"probe", mode="create")
            try:
                self._fs.pipe_file(path, b"again", mode="create")
            except FileExistsError:
                return True
            finally:
                self._fs.rm_file(path)
        except _S3_ERRORS as error:
            raise LedgerError(f"ledger {self.uri}: cannot write there: {error}") from error
        return False
