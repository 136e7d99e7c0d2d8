"""The ledger in a bucket, through s3fs: `If-None-Match: *` makes each key appear whole, once.

Only outputs of stages go by multipart upload, since some stores (Ceph's) ignore the condition there
though they honour it for a whole object. On those each try of a stage has keys of its own.

A request whose reply is lost is sent again (`agl_core.ledger.s3_requests`), and then meets its own
result. So each write carries a nonce in the object's metadata: a key that exists with our nonce is
ours.
"""

import io
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from agl_core.errors import ConflictError, LedgerError
from agl_core.ledger.s3_access import ENVIRONMENT, S3Access
from agl_core.ledger.s3_errors import (
    S3_ERRORS,
    ledger_error,
    may_have_been_done,
    says_exists,
    says_not_implemented,
)
from agl_core.ledger.s3_requests import PatientFileSystem
from agl_core.ledger.storage import check_key

logger = logging.getLogger(__name__)

_PART_BYTES = 50 << 20
"""Of a multipart upload; files of less than two parts go in one request."""
_NONCE = "agl-write"
_PROBE_KEY = "probes/conditional-put"
_PROBE_SECONDS = 5.0


class S3Storage:
    """Write-once objects below `s3://bucket/prefix` (the `Storage` protocol).

    Some stores ignore `If-None-Match`. Without `conditional_put` each write first looks whether the
    key exists; two writers at the same moment are then not told apart.
    """

    def __init__(
        self, uri: str, access: S3Access = ENVIRONMENT, *, conditional_put: bool = True
    ) -> None:
        self.uri = uri.rstrip("/")
        self.conditional_put = conditional_put
        self.conditional_multipart = conditional_put
        self._access = access
        self._root = self.uri.removeprefix("s3://")
        self._bucket = self._root.partition("/")[0]
        self._fs: Any = PatientFileSystem.of(access.options())

    def probe(self) -> bool:
        """Write a small object twice, without a condition where the store knows none, and where it
        refuses the second write, try to replace the object by a multipart upload.

        The object stays: the next probe is refused writes, and needs no right to delete. A store
        that does not answer now is found out sooner than in the middle of a run.
        """
        try:
            with self._fs.hurried(_PROBE_SECONDS):
                honoured = self._refuses_second_write(f"{self._root}/{_PROBE_KEY}")
                in_parts = honoured and self._refuses_multipart(f"{self._root}/{_PROBE_KEY}")
        except S3_ERRORS as error:
            raise self._error(error, "write there") from error
        self.conditional_put, self.conditional_multipart = honoured, in_parts
        if honoured:
            logger.info("ledger %s: can be written; conditional put is honoured", self.uri)
            if not in_parts:
                logger.info(
                    "ledger %s: the store ignores conditions of multipart uploads, so each try of "
                    "a stage writes under a name that no other process uses",
                    self.uri,
                )
        else:
            logger.warning(
                "ledger %s: can be written; conditional put is NOT honoured, so two processes that "
                "write a key at the same moment are not told apart: run each run in one place only",
                self.uri,
            )
        return honoured

    def read(self, key: str) -> bytes:
        """Return the whole content of a small object."""
        path = self._path(key)
        try:
            # Concurrent reads would begin with a request for the size.
            content = self._fs.patiently(self._fs.cat_file, path, max_concurrency=1)
            return cast("bytes", content)
        except S3_ERRORS as error:
            raise self._error(error, f"read {key}") from error

    def open(self, key: str) -> BinaryIO:
        """Return a seekable reader that fetches the ranges it needs."""
        path = self._path(key)
        try:
            file = self._fs.open(path, "rb")
        except S3_ERRORS as error:
            raise self._error(error, f"read {key}") from error
        return io.BufferedReader(_Reader(file, lambda error: self._error(error, f"read {key}")))

    def write_once(self, key: str, data: bytes) -> None:
        """Write a new object, in one request: a record never depends on a multipart upload."""
        whole = max(_PART_BYTES, len(data))
        self._create(
            key,
            lambda path, options: self._fs.pipe_file(path, data, chunksize=whole, **options),
        )

    def put_file(self, key: str, path: Path) -> None:
        """Write a new object from a local file; large ones by multipart upload."""
        self._create(
            key,
            lambda target, options: self._fs.put_file(
                str(path), target, chunksize=_PART_BYTES, **options
            ),
        )

    def replace(self, key: str, data: bytes) -> None:
        """Write an object that may change."""
        try:
            self._fs.pipe_file(self._path(key), data)
        except S3_ERRORS as error:
            raise self._error(error, f"write {key}") from error

    def exists(self, key: str) -> bool:
        """Say whether the object has been written."""
        path = self._path(key)
        try:
            return self._head(path) is not None
        except S3_ERRORS as error:
            raise self._error(error, f"look for {key}") from error

    def list(self, prefix: str) -> list[str]:
        """Return all keys that start with a prefix ending in `/`, sorted."""
        try:
            # With the prefix as a part of the path, s3fs looks for a file where it finds none.
            found: list[str] = self._fs.patiently(self._fs.find, self._root, prefix=prefix)
        except S3_ERRORS as error:
            raise self._error(error, f"list {prefix}") from error
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def local_path(self, key: str) -> Path | None:
        """Return None: objects are not files of this machine."""
        del key
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _head(self, path: str) -> dict[str, Any] | None:
        """Return what the store says about an object; None where there is none."""
        key = path.removeprefix(f"{self._bucket}/")
        try:
            return self._fs.call_s3("head_object", Bucket=self._bucket, Key=key)
        except FileNotFoundError:
            return None

    def _create(self, key: str, put: Callable[[str, dict[str, Any]], object]) -> None:
        path = self._path(key)
        nonce = uuid.uuid4().hex
        options = {"mode": "create" if self.conditional_put else "overwrite"}
        if not self.conditional_put and self.exists(key):
            raise self._conflict(key)
        try:
            put(path, options | {"Metadata": {_NONCE: nonce}})
        except S3_ERRORS as error:
            if may_have_been_done(error) and self._has_nonce(path, nonce):
                return
            if says_exists(error):
                raise self._conflict(key) from error
            raise self._error(error, f"write {key}") from error

    def _has_nonce(self, path: str, nonce: str) -> bool:
        """Say whether the object is the one that a write with this nonce made."""
        try:
            found = self._head(path)
        except S3_ERRORS:
            return False  # the error of the write says more
        return found is not None and found.get("Metadata", {}).get(_NONCE) == nonce

    def _refuses_second_write(self, path: str) -> bool:
        try:
            for _ in range(2):
                self._fs.pipe_file(path, b"", mode="create")
        except S3_ERRORS as error:
            if says_exists(error):
                return True
            if not says_not_implemented(error):
                raise
            self._fs.pipe_file(path, b"")
        return False

    def _refuses_multipart(self, path: str) -> bool:
        """Say whether an object that exists stays when a conditional multipart upload ends."""
        where = {"Bucket": self._bucket, "Key": path.removeprefix(f"{self._bucket}/")}
        upload: dict[str, Any] = {}
        try:
            upload = self._fs.call_s3("create_multipart_upload", **where)
            where["UploadId"] = upload["UploadId"]
            part = self._fs.call_s3("upload_part", **where, PartNumber=1, Body=b"-")
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            self._fs.call_s3(
                "complete_multipart_upload", **where, MultipartUpload=parts, IfNoneMatch="*"
            )
        except S3_ERRORS as error:
            if upload:
                with suppress(*S3_ERRORS):
                    self._fs.call_s3("abort_multipart_upload", **where)
            if says_exists(error):
                return True
            if not says_not_implemented(error):
                raise
        return False

    def _conflict(self, key: str) -> ConflictError:
        return ConflictError(f"ledger {self.uri}: {key} exists; keys are written once")

    def _error(self, error: BaseException, doing: str) -> LedgerError:
        return ledger_error(error, self.uri, doing, self._access)


class _Reader(io.RawIOBase):
    """An open object whose failed requests are errors of the ledger."""

    def __init__(self, file: Any, as_ledger_error: Callable[[BaseException], LedgerError]) -> None:
        self._file = file
        self._as_ledger_error = as_ledger_error

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read from any position."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes."""
        try:
            return self._file.fs.patiently(self._file.readinto, buffer)
        except S3_ERRORS as error:
            raise self._as_ledger_error(error) from error

    def close(self) -> None:
        """Close the object's file."""
        self._file.close()
        super().close()
